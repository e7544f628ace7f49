"""POST /update_weights_from_disk: all or nothing, equal to a fresh start, harmless when refused."""
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time

import checkpoint
from harness import EARLY, FINAL, MOULT, SLOW, Server, signature

UPDATE = "/update_weights_from_disk"
LONG = 300 if SLOW else 1500  # tokens of a request that is still running when an update arrives


def rewrite(path, change):
    """Rewrite one safetensors file: change(header) edits names, shapes; data stay where they are."""
    raw = open(path, "rb").read()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + n])
    data = change(header, raw[8 + n:])
    text = json.dumps(header).encode()
    open(path, "wb").write(len(text).to_bytes(8, "little") + text + data)


def drop(name):
    def change(header, data):
        a, b = header.pop(name)["data_offsets"]
        for k, v in header.items():
            if k != "__metadata__" and v["data_offsets"][0] >= b:
                v["data_offsets"] = [x - (b - a) for x in v["data_offsets"]]
        return data[:a] + data[b:]
    return change


def reshape(name):
    def change(header, data):
        header[name]["shape"] = header[name]["shape"][::-1] + [1]
        return data
    return change


def rename(old, new):
    def change(header, data):
        header[new] = header.pop(old)
        return data
    return change


def shards(root, name, count=3):
    """FINAL in `count` files with an index; gives the folder and the files' names."""
    d = os.path.join(root, name)
    shutil.copytree(FINAL, d)
    one = os.path.join(d, "model-00001-of-00001.safetensors")
    raw = open(one, "rb").read()
    n = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:8 + n]), raw[8 + n:]
    header.pop("__metadata__", None)
    os.remove(one)
    files, where = [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)], {}
    for i, f in enumerate(files):
        part, out = {}, b""
        for k in sorted(header)[i::count]:
            a, b = header[k]["data_offsets"]
            part[k] = dict(header[k], data_offsets=[len(out), len(out) + b - a])
            out += data[a:b]
            where[k] = f
        text = json.dumps(part).encode()
        open(os.path.join(d, f), "wb").write(len(text).to_bytes(8, "little") + text + out)
    json.dump({"metadata": {}, "weight_map": where}, open(d + "/model.safetensors.index.json", "w"))
    return d, files


def zeros(path, like):
    """A copy of a weight file with every byte of its data zero."""
    raw = open(like, "rb").read()
    n = 8 + int.from_bytes(raw[:8], "little")
    open(path, "wb").write(raw[:n] + bytes(len(raw) - n))


def test_shards_and_strays():
    """C01, C03, C05: every absent file and tensor is named; with an index nothing else is opened, without one a
    tensor that stands twice is refused with both files."""
    with Server(FINAL) as fresh:
        want = signature(fresh)
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as s:
        before = signature(s)
        d, files = shards(root, "whole")
        assert s.post(UPDATE, {"model_path": d})[0] == 200 and signature(s) == want
        assert s.post(UPDATE, {"model_path": EARLY})[0] == 200
        for f in ("model.safetensors", "consolidated.safetensors", "model-00001-of-00004.safetensors"):
            zeros(os.path.join(d, f), os.path.join(d, files[0]))
        os.mkfifo(os.path.join(d, "model-00002-of-00004.safetensors"))  # would be refused if it were opened
        assert s.post(UPDATE, {"model_path": d})[0] == 200 and signature(s) == want
        with Server(d) as again:
            assert signature(again) == want
        assert s.post(UPDATE, {"model_path": EARLY})[0] == 200
        os.remove(os.path.join(d, "model-00002-of-00004.safetensors"))
        os.remove(os.path.join(d, "model.safetensors.index.json"))
        status, r = s.post(UPDATE, {"model_path": d})
        assert status == 400 and sum(f in r["message"] for f in os.listdir(d)) == 2, r
        gone, files = shards(root, "gone", 4)
        os.remove(os.path.join(gone, files[1]))
        os.remove(os.path.join(gone, files[3]))
        less, files = shards(root, "less")
        names = ["model.layers.1.mlp.experts.5.down_proj.weight", "model.layers.0.self_attn.q_norm.weight", "lm_head.weight"]
        index = json.load(open(less + "/model.safetensors.index.json"))
        for k in names:
            rewrite(os.path.join(less, index["weight_map"].pop(k)), drop(k))
        json.dump(index, open(less + "/model.safetensors.index.json", "w"))
        more, files = shards(root, "more")
        index = json.load(open(more + "/model.safetensors.index.json"))
        f = index["weight_map"]["model.other.weight"] = index["weight_map"].pop("model.norm.weight")
        rewrite(os.path.join(more, f), rename("model.norm.weight", "model.other.weight"))
        json.dump(index, open(more + "/model.safetensors.index.json", "w"))
        for d, says in ((gone, ["model-00002-of-00004.safetensors", "model-00004-of-00004.safetensors"]), (less, names),
                        (more, ["model.other.weight"])):
            status, r = s.post(UPDATE, {"model_path": d})
            assert status == 400 and all(x in r["message"] for x in says), (says, r)
            p = subprocess.run([MOULT, "serve", "--model-path", d, "--port", "0"], capture_output=True, text=True, timeout=60)
            assert p.returncode == 1 and all(x in p.stderr for x in says), p.stderr
        assert signature(s) == before


def variants(root):
    """(folder, what the refusal must name)"""
    def copy(name):
        d = os.path.join(root, name)
        shutil.copytree(FINAL, d)
        return d, os.path.join(d, "model-00001-of-00001.safetensors")
    d, f = copy("missing-shard")
    os.remove(f)
    yield d, "model-00001-of-00001.safetensors"
    for i, name in enumerate(("model.layers.1.mlp.experts.5.down_proj.weight", "lm_head.weight",
                              "model.layers.2.mlp.gate.weight")):
        d, f = copy(f"missing-tensor-{i}")
        rewrite(f, drop(name))
        index = json.load(open(d + "/model.safetensors.index.json"))
        del index["weight_map"][name]
        json.dump(index, open(d + "/model.safetensors.index.json", "w"))
        yield d, name
    d, f = copy("wrong-shape")
    rewrite(f, reshape("model.layers.0.self_attn.q_proj.weight"))
    yield d, "model.layers.0.self_attn.q_proj.weight"
    d, f = copy("truncated")
    os.truncate(f, os.path.getsize(f) // 2)
    yield d, "model-00001-of-00001.safetensors"
    d, f = copy("other-rope")
    c = json.load(open(d + "/config.json"))
    c["rope_theta"] = 10000.0
    json.dump(c, open(d + "/config.json", "w"))
    yield d, "rope_theta"
    d, f = copy("garbage")
    open(f, "wb").write(b"\xff" * 1000)
    yield d, "model-00001-of-00001.safetensors"
    yield os.path.join(root, "nowhere"), "nowhere"
    yield __file__, os.path.basename(__file__)


def test_update_equals_fresh_start():
    with Server(FINAL) as fresh:
        want = signature(fresh)
    with Server(EARLY) as s:
        before = signature(s)
        assert before != want
        status, r = s.post(UPDATE, {"model_path": FINAL, "weight_version": "7"})
        assert status == 200 and r["success"] is True, r
        assert {"stage_s", "drain_s", "swap_s", "num_paused_requests"} <= set(r), r
        assert "Weight version updated to 7" in r["message"], r
        assert signature(s) == want
        info = s.get("/model_info")[1]
        assert info["model_path"] == FINAL and info["weight_version"] == "7"
        status, r = s.post(UPDATE, {"model_path": EARLY})
        assert status == 200 and signature(s) == before
        assert s.get("/model_info")[1]["weight_version"] == "7"


def test_refused_updates_change_nothing():
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as s:
        before = signature(s)
        full = s.generate([5, 6, 7], LONG, ignore_eos=True)
        for d, name in variants(root):
            running = {}
            t = threading.Thread(target=lambda: running.update(s.generate([5, 6, 7], LONG, ignore_eos=True)))
            t.start()
            status, r = s.post(UPDATE, {"model_path": d, "weight_version": "bad", "abort_all_requests": True})
            t.join()
            assert status == 400 and r["success"] is False, (d, status, r)
            assert name in r["message"], (name, r)
            assert running["output_ids"] == full["output_ids"], "a refused update disturbed a request"
            assert running["meta_info"]["output_token_logprobs"] == full["meta_info"]["output_token_logprobs"]
            info = s.get("/model_info")[1]
            assert info["model_path"] == EARLY and info["weight_version"] == "default"
        for body in ("{}", '{"model_path": 5}', '{"model_path": ""}', "x"):
            assert s.post(UPDATE, body)[0] == 400
        assert signature(s) == before


def test_bad_folders_are_refused_at_start():
    with tempfile.TemporaryDirectory() as root:
        for d, name in variants(root):
            if name == "rope_theta":
                continue
            s = Server(d, wait=False)
            code = s.proc.wait(60 if SLOW else 10)
            assert code not in (0, None) and code > 0, (d, code)
            assert name in s.text(), (name, s.text())


def test_same_path_is_read_again():
    """C11: files replaced on disk matter at the next update only; nothing is mapped."""
    with tempfile.TemporaryDirectory() as root:
        d = os.path.join(root, "m")
        shutil.copytree(EARLY, d)
        with Server(d) as s:
            before = signature(s)
            maps = open(f"/proc/{s.proc.pid}/maps").read()
            assert "safetensors" not in maps
            shutil.copy(os.path.join(FINAL, "model-00001-of-00001.safetensors"), d)
            assert signature(s) == before
            assert s.post(UPDATE, {"model_path": d})[0] == 200
            after = signature(s)
        with Server(FINAL) as fresh:
            assert after == signature(fresh)


def bytes_read(pid):
    return int(re.search(r"rchar: (\d+)", open(f"/proc/{pid}/io").read()).group(1))


def test_truncated_while_it_is_read():
    """C11(c): the file shrinks to half after the update has begun to read it; 20 times."""
    with tempfile.TemporaryDirectory() as root:
        size = 2048
        good = checkpoint.chain(os.path.join(root, "good"), {10: 11, 11: 12, 12: 13}, size=size)
        d = os.path.join(root, "d")
        shutil.copytree(good, d)
        f = os.path.join(d, "model.safetensors")
        whole = os.path.getsize(f)
        with Server(good) as s:
            want = s.generate([10], 8)["output_ids"]
            got = []
            for _ in range(20):
                shutil.copyfile(os.path.join(good, "model.safetensors"), f)
                out = {}
                t = threading.Thread(target=lambda: out.update(zip(("status", "r"), s.post(UPDATE, {"model_path": d}))))
                before = bytes_read(s.proc.pid)
                t.start()
                while bytes_read(s.proc.pid) < before + whole // 8 and t.is_alive():
                    pass
                os.truncate(f, whole // 2)
                t.join()
                got.append(out["status"])
                if out["status"] == 400:
                    assert "model.safetensors" in out["r"]["message"], out
                assert s.generate([10], 8)["output_ids"] == want
            assert set(got) <= {200, 400} and got.count(400) >= 15, got  # 200: all was read before


def bad_weight_files():
    """C65, C67: (bytes of the file, what the refusal must say)"""
    def f(n, body=b"", rest=b""):
        return struct.pack("<Q", n) + body + rest
    for n in range(8):
        yield b"\x02" * n, "too short"
    for n in (1 << 63) - 1, (1 << 64) - 1, (1 << 64) - 5, 100000001, 56, 57:
        yield f(n, b"x" * 56 if n in (56, 57) else b"{}"), "header"
    yield f(0), "header"
    yield f(1, b"{"), "byte"
    yield f(2, b"{}"), "missing tensors"
    yield f(7, b'{"a":1}'), "a"
    yield f(3, b"[1]"), "'{'"
    yield f(99000000, b"{", b" " * 98999998 + b"}"), "missing tensors"
    for shape, dtype, span in (("[4294967296,4294967296]", '"BF16"', "[0,2]"), ("[4611686018427387904,4]", '"BF16"', "[0,2]"),
                               ("[-1]", '"BF16"', "[0,2]"), ("[]", '"F32"', "[0,2]"), ("[" + "1," * 99 + "1]", '"BF16"', "[0,2]"),
                               ("[4398046511105,1152]", '"BF16"', "[0,2]"), ("[1]", '"BF61"', "[0,2]"), ("[1]", '"bf16"', "[0,2]"),
                               ("[1]", "5", "[0,2]"), ("[1]", "null", "[0,2]"), ("[3]", '"F4"', "[0,2]"), ("[1]", '"BF16"', "[0,1]"),
                               ("[1]", '"BF16"', "[0,9]")):
        h = f'{{"model.norm.weight":{{"dtype":{dtype},"shape":{shape},"data_offsets":{span}}}}}'.encode()
        yield f(len(h), h, b"\0\0"), "model.norm.weight"


def memory_peak(pid):
    return int(re.search(r"VmHWM:\s+(\d+)", open(f"/proc/{pid}/status").read()).group(1)) << 10


def test_bad_weight_files():
    """C65, C67: each is refused by name, soon, in little memory, as an update and at the start."""
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as s:
        d = os.path.join(root, "m")
        shutil.copytree(EARLY, d)
        os.remove(d + "/model.safetensors.index.json")
        f = os.path.join(d, "model-00001-of-00001.safetensors")
        s.settle()
        before, peak = signature(s), memory_peak(s.proc.pid)
        for i, (data, says) in enumerate(bad_weight_files()):
            open(f, "wb").write(data)
            cpu = s.cpu()
            status, r = s.post(UPDATE, {"model_path": d})
            took = s.cpu() - cpu
            assert status == 400 and says in r["message"], (i, status, r)
            assert SLOW or took < (2 if len(data) > 1e6 else 0.25), (i, took)
            if i % 3 == 0 or len(data) > 1e6:
                p = subprocess.run([MOULT, "serve", "--model-path", d, "--port", "0"], capture_output=True, text=True, timeout=60)
                assert p.returncode == 1 and says in p.stderr, (i, p.returncode, p.stderr)
        # a second generation of weights is in the peak once
        assert SLOW or memory_peak(s.proc.pid) - peak < 64 << 20, memory_peak(s.proc.pid) - peak
        assert signature(s) == before


def test_update_under_load():
    """Running requests drain under their weights, later ones see the new; the prefix cache never mixes (C09)."""
    p = [(i * 11) % 2000 for i in range(512)]
    with Server(FINAL) as fresh:
        want = fresh.generate(p, 16, ignore_eos=True)
    with Server(EARLY) as s:
        old = s.generate(p, 16, ignore_eos=True)
        long = s.generate([5, 6, 7], LONG, ignore_eos=True)
        got = [None] * 16
        def ask(i):
            got[i] = s.generate([5, 6, 7], LONG, ignore_eos=True)
        ts = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
        for t in ts:
            t.start()
        time.sleep(0.2)
        status, r = s.post(UPDATE, {"model_path": FINAL, "flush_cache": True, "weight_version": "2"})
        assert status == 200, r
        for t in ts:
            t.join()
        for g in got:
            assert g["output_ids"] == long["output_ids"] and g["meta_info"]["weight_version"] == "default"
        for flush in (True, False):
            new = s.generate(p, 16, ignore_eos=True)
            assert new["meta_info"]["cached_tokens"] == 0
            assert new["output_ids"] == want["output_ids"]
            assert new["meta_info"]["output_token_logprobs"] == want["meta_info"]["output_token_logprobs"]
            assert s.post(UPDATE, {"model_path": EARLY, "flush_cache": False})[0] == 200
            back = s.generate(p, 16, ignore_eos=True)
            assert back["meta_info"]["cached_tokens"] == 0 and back["output_ids"] == old["output_ids"]
            assert s.post(UPDATE, {"model_path": FINAL, "flush_cache": flush})[0] == 200


def test_late_pages_of_old_weights():
    """C09: a request that began under the old weights puts no page where the new ones look, flushed or not."""
    p = [(i * 7) % 2000 for i in range(200)]
    with Server(FINAL) as fresh:
        n = 100
        with Server(EARLY) as s:
            old = []
            t = threading.Thread(target=lambda: old.append(s.generate(p, n, ignore_eos=True)))
            t.start()
            while s.loads()["num_running_reqs"] == 0 and t.is_alive():
                time.sleep(0.002)
            assert s.post(UPDATE, {"model_path": FINAL, "flush_cache": False})[0] == 200
            t.join()
            q = p + old[0]["output_ids"]
            got, want = s.generate(q, 8, ignore_eos=True), fresh.generate(q, 8, ignore_eos=True)
            assert got["meta_info"]["cached_tokens"] == 0, got["meta_info"]
            assert got["output_ids"] == want["output_ids"]
            assert got["meta_info"]["output_token_logprobs"] == want["meta_info"]["output_token_logprobs"]
            assert s.generate(q, 8, ignore_eos=True)["meta_info"]["cached_tokens"] >= 288


def test_abort_all_updates_at_once():
    with Server(EARLY, "--max-running-requests", "4") as s:
        got = []
        ts = [threading.Thread(target=lambda: got.append(s.generate([5], 3900, ignore_eos=True))) for _ in range(8)]
        for t in ts:
            t.start()
        time.sleep(0.3)
        status, r = s.post(UPDATE, {"model_path": FINAL, "abort_all_requests": True})
        assert status == 200 and (SLOW or r["drain_s"] < 1), r
        for t in ts:
            t.join()
        assert len(got) == 8 and all(g["meta_info"]["finish_reason"]["type"] == "abort" for g in got)
        s.idle()
