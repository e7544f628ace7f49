"""Updates from tensors, reads of weights, release and resume: against files written and read here, by numpy-free code
and, where it is installed, by the safetensors package."""
import http.client
import json
import os
import re
import shutil
import struct
import subprocess
import tempfile
import threading
import time
from multiprocessing import shared_memory

from harness import EARLY, FINAL, MOULT, SLOW, Server, signature

try:
    import ml_dtypes
    import numpy
    import safetensors.numpy
    PEER = {"BF16": ml_dtypes.bfloat16, "F32": numpy.float32, "U8": numpy.uint8, "F8_E4M3": ml_dtypes.float8_e4m3fn}
except ImportError:
    safetensors = None
    print("skip    test_tensor: comparisons with the safetensors package (and numpy, ml_dtypes)")

TENSOR = "/update_weights_from_tensor"
BYTES = {"Content-Type": "application/octet-stream"}
SHARED = "../shared/models/tiny-moe/"
Q = "model.layers.1.self_attn.q_proj"
EXPERT = "model.layers.0.mlp.experts.3."


def folder_file(d):
    return os.path.join(d, "model-00001-of-00001.safetensors" if d in (EARLY, FINAL) else "model.safetensors")


def parse(raw):
    """{name: (dtype, shape, bytes)}"""
    n = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8:8 + n]), raw[8 + n:]
    header.pop("__metadata__", None)
    return {k: (v["dtype"], v["shape"], data[v["data_offsets"][0]:v["data_offsets"][1]]) for k, v in header.items()}


def read(d):
    return parse(open(folder_file(d), "rb").read())


def pack(tensors, metadata=None):
    """The bytes of a safetensors file."""
    header, at = {}, 0
    if metadata:
        header["__metadata__"] = metadata
    for k, (dtype, shape, data) in tensors.items():
        header[k] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(t[2] for t in tensors.values())


def peer_pack(tensors):
    """The same by the safetensors package, which orders and aligns them its own way."""
    if not safetensors:
        return pack(tensors)
    return safetensors.numpy.save({k: numpy.frombuffer(b, PEER[d]).reshape(s) for k, (d, s, b) in tensors.items()})


def peer_parse(raw):
    return {k: (v["dtype"], list(v["shape"]), bytes(v["data"])) for k, v in safetensors.deserialize(raw)}


def send(s, tensors, query="", metadata=None):
    return s.post(TENSOR + query, pack(tensors, metadata), headers=BYTES)


def chunked(s, pieces):
    """A body whose length is not told before."""
    c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=60)
    c.request("POST", TENSOR, iter(pieces), BYTES, encode_chunked=True)
    r = c.getresponse()
    return r.status, r.read()


def must(answer):
    assert answer[0] == 200 and answer[1]["success"] is True, answer
    return answer[1]


def refused(answer, *says, status=400):
    assert answer[0] == status and answer[1]["success"] is False, answer
    for text in says:
        assert text in answer[1]["message"], (text, answer)


def merged(root, name, base, tensors):
    """A copy of a model folder in which some tensors are others."""
    d = os.path.join(root, name)
    shutil.copytree(base, d)
    have = read(base)
    for k, v in tensors.items():
        assert have[k][:2] == v[:2], k
    have.update(tensors)
    open(os.path.join(d, os.path.basename(folder_file(base))), "wb").write(pack(have))
    return d


def flipped(t, step=97):
    """The last bit of some elements is another: of BF16 and F32 a mantissa's, of bytes one that makes no NaN."""
    dtype, shape, data = t
    width = {"BF16": 2, "F32": 4}.get(dtype, 1)
    out = bytearray(data)
    for i in range(0, len(out), width * step):
        if width > 1 or out[i] & 0x7f < 0x7e:
            out[i] ^= 1
    return dtype, shape, bytes(out)


def formats(*some):
    """Folders: BF16, and quantized ones (all of them, or some)."""
    yield EARLY
    for d in some or (("nvfp4",) if SLOW else ("fp8", "nvfp4", "mxfp8-last1-bf16")):
        if os.path.isdir(SHARED + d):
            yield SHARED + d
        else:
            print(f"skip    test_tensor {d}: needs {SHARED}")


def chosen(have):
    """A dense projection, an expert and a norm, with all that belongs to them."""
    names = [k for k in have if k.startswith((Q + ".", EXPERT)) or k == "model.layers.2.input_layernorm.weight"]
    assert len(names) >= 5, names
    return {k: flipped(have[k]) if k.endswith((".weight", ".weight_scale")) else have[k] for k in names}


def test_partial_equals_fresh_start():
    """Some tensors of every format, in one call: the server is as one started on a folder that has them."""
    with tempfile.TemporaryDirectory() as root:
        for i, base in enumerate(formats()):
            change = chosen(read(base))
            with Server(merged(root, str(i), base, change)) as fresh:
                want, sums = signature(fresh), must(fresh.post("/weights_checker", {}))
            with Server(base) as s:
                before = signature(s)
                r = must(s.post(TENSOR + "?weight_version=7", peer_pack(change), headers=BYTES))
                assert r["bytes"] == sum(len(t[2]) for t in change.values()) and r["epoch"] == 2, r
                assert signature(s) == want != before, base
                assert s.get("/model_info")[1]["weight_version"] == "7"
                assert must(s.post("/weights_checker", {})) == sums
                back = {k: t for k, t in read(base).items() if k in change}
                must(send(s, back, metadata={"weight_version": "8", "format": "pt"}))
                assert signature(s) == before and s.get("/model_info")[1]["weight_version"] == "8"


def test_sessions():
    """Buckets in any order, a weight and its scales in different ones: nothing happens before the end."""
    for base in formats():
        have = read(base)
        with Server(base) as s:
            before = signature(s)
            change = chosen(have)
            must(send(s, change))
            want = signature(s)
            must(send(s, {k: have[k] for k in change}))
            assert signature(s) == before
            must(s.post("/begin_weight_update", {"selector": "target"}))
            refused(s.post("/begin_weight_update", {}), "open already")
            refused(s.post("/update_weights_from_disk", {"model_path": base}), "/begin_weight_update")
            for k in sorted(change, reverse=True):
                must(send(s, {k: change[k]}, "?weight_version=s1&flush_cache=false"))
            refused(send(s, {k: change[k]}), k, "twice")
            assert signature(s) == before and s.get("/model_info")[1]["weight_version"] == "default"
            more = [k for k in have if re.match(r"model\.layers\.2\.mlp\.experts\.[0-3]\.", k)]
            ts = [threading.Thread(target=send, args=(s, {k: have[k]})) for k in more]
            for t in ts:
                t.start()
            for t in ts:
                t.join()
            assert sum("twice" in send(s, {k: have[k]})[1]["message"] for k in more) == len(more)
            assert must(s.post("/end_weight_update", {}))["epoch"] == 4
            assert signature(s) == want and s.get("/model_info")[1]["weight_version"] == "s1"
            # the end names what is missing, the weights stay, and the session is over
            must(s.post("/begin_weight_update", {}))
            must(s.post("/begin_weight_update", {"restart": True}))
            scales = [k for k in have if k.startswith(Q + ".weight_scale")]
            if scales:
                must(send(s, {Q + ".weight": have[Q + ".weight"]}))
                refused(s.post("/end_weight_update", {}), Q, "missing: " + Q + ".weight_scale")
                refused(send(s, {scales[0]: have[scales[0]]}), scales[0], "missing: " + Q + ".weight")
                for k in scales[:-1]:  # NVFP4 has two
                    refused(send(s, {Q + ".weight": have[Q + ".weight"], k: have[k]}), "missing: ")
            else:
                refused(s.post("/end_weight_update", {}), "no tensors")
            refused(s.post("/end_weight_update", {}), "no session")
            assert signature(s) == want
            must(s.post("/post_process_weights", {}))
            refused(s.post("/begin_weight_update", {"selector": "draft"}), "selector")


def test_session_at_continue():
    """Buckets that nobody ended commit when generation goes on, or are refused there; discard drops them."""
    for base in formats("fp8"):
        have = read(base)
        change = chosen(have)
        with Server(base) as s:
            before = signature(s)
            must(send(s, change))
            want = signature(s)
            must(send(s, {k: have[k] for k in change}))
            assert s.post("/pause_generation", {"mode": "retract"})[0] == 200
            must(s.post("/begin_weight_update", {}))
            for k in change:
                must(send(s, {k: change[k]}, "?weight_version=9&flush_cache=false"))
            assert s.get("/weight_update_status")[1]["state"] == "session"
            assert must(s.post("/update_weight_version", {"new_version": "8", "abort_all_requests": False}))
            assert s.post("/continue_generation", {})[0] == 200
            assert signature(s) == want and s.get("/model_info")[1]["weight_version"] == "9"
            status = s.get("/weight_update_status")[1]
            assert status["state"] == "idle" and status["updates"][0]["source"] == "tensors", status
            assert status["updates"][0]["outcome"] == "committed" and status["updates"][0]["version"] == "9"
            # what cannot be used: the old weights stay, nothing goes on, and the next call does
            assert s.post("/pause_generation", {"mode": "retract"})[0] == 200
            must(s.post("/begin_weight_update", {}))
            bad = {k: t for k, t in have.items() if k == Q + ".weight"}
            if base == EARLY:
                bad = {"model.x.weight": bad[Q + ".weight"]}
            must(send(s, bad))
            status, r = s.post("/continue_generation", {})
            assert status == 400 and ("missing: " + Q if base != EARLY else "model.x.weight") in r["message"], r
            assert s.loads()["paused"] == "retract"
            assert s.post("/continue_generation", {})[0] == 200
            assert signature(s) == want
            must(s.post("/begin_weight_update", {}))
            must(send(s, bad))
            must(s.post("/discard_staged_weights", {}))
            refused(s.post("/discard_staged_weights", {}), "staged")
            must(s.post("/begin_weight_update", {}))
            assert s.post("/continue_generation", {})[0] == 200  # without tensors it is dropped
            refused(s.post("/end_weight_update", {}), "no session")
            must(s.post("/stage_weights_from_disk", {"model_path": base}))
            refused(send(s, change), "is staged")
            refused(s.post("/begin_weight_update", {}), "is staged")
            must(s.post("/commit_weights", {}))
            assert signature(s) == before
            must(s.post("/begin_weight_update", {}))  # and a stop need not wait for it


def test_partial_in_place():
    """Without memory for a second generation a partial update is written over the resident one."""
    for base in formats("nvfp4"):
        have = read(base)
        change = chosen(have)
        with Server(base) as s:
            before = signature(s)
            must(send(s, change))
            want, sums = signature(s), must(s.post("/weights_checker", {}))
        with Server(base, "--update-staging", "off") as s:
            must(send(s, change))
            assert signature(s) == want and must(s.post("/weights_checker", {})) == sums
            refused(send(s, {"model.norm.weight": change["model.layers.2.input_layernorm.weight"][:2] + (b"\xff\x7f" * 256,)}), "model.norm")
            refused(s.post("/weights_checker", {"action": "reset_tensors"}), "--update-staging")
            must(s.post("/begin_weight_update", {}))
            for k in change:
                must(send(s, {k: have[k]}))
            must(s.post("/end_weight_update", {}))
            assert signature(s) == before


def test_refusals():
    have = read(EARLY)
    norm = "model.norm.weight"
    dtype, shape, data = have[norm]
    nan = (dtype, shape, data[:10] + b"\xc0\x7f" + data[12:])
    with Server(EARLY, "--max-weight-body", "300000") as s:
        before = signature(s)
        refused(s.post(TENSOR, {"serialized_named_tensors": ["gASV"], "load_format": "flattened_bucket"}),
                "serialized_named_tensors", "application/octet-stream", "shm_name", "file_path")
        refused(s.post(TENSOR, {}), "shm_name", "file_path")
        refused(s.post(TENSOR, {"load_format": "direct"}), "load_format", "direct")
        refused(send(s, {"model.other.weight": have[norm]}), "model.other.weight", "unknown")
        refused(send(s, {norm: (dtype, [len(data) // 4, 2], data)}), norm, "shape")
        refused(send(s, {norm: nan, Q + ".weight": have[Q + ".weight"]}), norm, "element 5", "not finite")
        refused(send(s, {Q + ".weight": ("F8_E4M3", have[Q + ".weight"][1], have[Q + ".weight"][2][::2])}), Q, "missing")
        refused(send(s, {}), "no tensors")
        refused(send(s, {norm: have[norm]}, "?flush_cache=perhaps"), "flush_cache", "perhaps")
        refused(send(s, {norm: have[norm]}, "?selector=draft"), "selector")
        refused(s.post(TENSOR, b"", headers=BYTES), "too short")
        refused(s.post(TENSOR, pack({norm: have[norm]})[:-1], headers=BYTES), norm)
        for route in ("init_weights_update_group", "destroy_weights_update_group", "update_weights_from_distributed",
                      "update_weights_from_ipc"):
            refused(s.post("/" + route, {"group_name": "g"}), route, "multi-GPU")
        status, r = s.post(TENSOR, bytes(300001), headers=BYTES)
        assert status == 413 and "--max-weight-body" in r["message"], r
        assert chunked(s, [bytes(100000)] * 4)[0] == 413
        assert chunked(s, [pack({norm: have[norm]})])[0] == 200
        assert signature(s) == before
    with Server(EARLY, "--api-key", "k") as s:
        assert send(s, {norm: have[norm]})[0] == 401
        assert s.post(TENSOR, pack({norm: have[norm]}), headers=dict(BYTES, Authorization="Bearer k"))[0] == 200


def test_hand_over():
    """Shared memory and files of the same host; whoever truncates them harms nobody."""
    whole = pack(read(FINAL))
    with Server(FINAL) as fresh:
        want = signature(fresh)
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as s:
        before = signature(s)
        shm = shared_memory.SharedMemory(create=True, size=len(whole) + 4096)
        name = "/" + shm.name.lstrip("/")
        try:
            shm.buf[64:64 + len(whole)] = whole
            ask = {"shm_name": name, "offset": 64, "size": len(whole), "weight_version": "shm"}
            must(s.post(TENSOR, ask))
            assert signature(s) == want and s.get("/model_info")[1]["weight_version"] == "shm"
            assert shm.name.lstrip("/") not in open(f"/proc/{s.proc.pid}/maps").read()
            refused(s.post(TENSOR, dict(ask, size=len(whole) + 8192)), name, "offset")
            refused(s.post(TENSOR, dict(ask, offset=0)), "header")
            os.truncate("/dev/shm" + name, len(whole) // 2)
            refused(s.post(TENSOR, ask), name)
            refused(s.post(TENSOR, {"shm_name": name, "offset": 64}), "tensor")
        finally:
            shm.close()
            shm.unlink()
        refused(s.post(TENSOR, ask), name)
        refused(s.post(TENSOR, {"shm_name": "a/b"}), "shm_name")
        refused(s.post(TENSOR, {"shm_name": name, "file_path": "x"}), "both")
        f = os.path.join(root, "f")
        open(f, "wb").write(pack(read(EARLY)))
        must(s.post(TENSOR, {"file_path": f}))
        assert signature(s) == before
        refused(s.post(TENSOR, {"file_path": root}), "regular")
        # a large body lies in memory once
        peak, size = memory_peak(s), 48 << 20
        refused(s.post(TENSOR, pack({"x": ("U8", [size], bytes(size))}), headers=BYTES), "a whole update has at most")
        assert SLOW or memory_peak(s) - peak < 1.2 * size, memory_peak(s) - peak
        os.mkfifo(os.path.join(root, "fifo"))
        refused(s.post(TENSOR, {"file_path": os.path.join(root, "fifo")}), "regular")
        open(f, "wb").write(whole)
        stop = threading.Event()

        def shrink():
            while not stop.is_set():
                os.truncate(f, len(whole) // 3)
                open(f, "wb").write(whole)
        t = threading.Thread(target=shrink)
        t.start()
        got = [s.post(TENSOR, {"file_path": f, "size": len(whole)}) for _ in range(3 if SLOW else 10)]
        stop.set()
        t.join()
        assert {a[0] for a in got} <= {200, 400}, got
        assert signature(s) in (before, want)


def test_partial_updates_under_load():
    """Partial updates while requests run: every answer is of one version, old or new."""
    have = read(EARLY)
    change = chosen(have)

    def ask(s):
        r = s.generate([5, 6, 7], 100, ignore_eos=True)
        return r["output_ids"], r["meta_info"]["output_token_logprobs"]
    with Server(EARLY) as s:
        old = ask(s)
        must(send(s, change))
        new = ask(s)
        assert old != new
        got = []
        ts = [threading.Thread(target=lambda: got.extend(ask(s) for _ in range(2 if SLOW else 4))) for _ in range(3)]
        for t in ts:
            t.start()
        n = 0
        while any(t.is_alive() for t in ts):
            must(send(s, {k: have[k] for k in change} if n % 2 == 0 else change))
            n += 1
        assert n >= 2 and all(a in (old, new) for a in got), n


def f32(bits):
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def one(x):
    """Rounded to float32: numbers of a reply have nine digits, which tell one float32 from all others."""
    return struct.unpack("<f", struct.pack("<f", x))[0]


def ones(row):
    return [one(x) for x in row]


def e4m3(b):
    m, e = b & 7, b >> 3 & 15
    x = m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)
    return -x if b & 128 else x


def values(have, module, row):
    """One row of a module's weight, in float32 steps as the formats define them."""
    dtype, shape, data = have[module + ".weight"]
    scale = have.get(module + ".weight_scale_inv") or have.get(module + ".weight_scale")
    if dtype == "BF16":
        return [f32(v << 16) for v in struct.unpack(f"<{shape[1]}H", data[row * shape[1] * 2:(row + 1) * shape[1] * 2])]
    cells = data[row * shape[1]:(row + 1) * shape[1]]
    if dtype == "U8":  # NVFP4
        table = (0, .5, 1, 1.5, 2, 3, 4, 6)
        codes = [c for b in cells for c in (b & 15, b >> 4)]
        second = struct.unpack("<f", have[module + ".weight_scale_2"][2])[0]
        return [one((-1) ** (c >> 3) * table[c & 7] * e4m3(scale[2][row * scale[1][1] + i // 16]) * second) for i, c in enumerate(codes)]
    if scale[0] == "U8":
        return [e4m3(c) * 2.0 ** (scale[2][row * scale[1][1] + i // 32] - 127) for i, c in enumerate(cells)]
    grid = struct.unpack(f"<{len(scale[2]) // 2}H", scale[2])  # BF16
    return [one(e4m3(c) * f32(grid[row // 128 * scale[1][1] + i // 128] << 16)) for i, c in enumerate(cells)]


def widened(t):
    """BF16 scales are kept as F32."""
    dtype, shape, data = t
    if dtype != "BF16":
        return t
    return "F32", shape, b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2))


def test_read_back():
    """Exact bytes of every tensor under the checkpoint's names, and values as its format stands for."""
    for base in formats():
        have = read(base)
        with Server(base) as s:
            weights = [k for k in have if k.endswith(".weight")]
            seen = set()
            for k in weights[::16 if SLOW else 5] + [Q + ".weight", EXPERT + "up_proj.weight", "model.norm.weight"]:
                status, raw = s.get("/get_weights_by_name?format=bytes&name=" + k, raw=True)
                assert status == 200, raw
                got = parse(raw)
                module = k[:-len(".weight")]
                want = {n: t if n.endswith(".weight") else widened(t) for n, t in have.items()
                        if n.rsplit(".", 1)[0] == module and not n.endswith(("k_scale", "v_scale"))}
                assert got == want, (base, k, got.keys(), want.keys())
                seen |= got.keys()
                assert not safetensors or peer_parse(raw) == got
                if k in weights[::40]:
                    must(s.post(TENSOR, raw, headers=BYTES))  # and they are what an update takes
            assert len(seen) >= 10
            status, raw = s.get("/get_weights_by_name", raw=True, body={"name": Q + ".weight"},
                                headers={"Accept": "application/octet-stream"})
            assert status == 200 and Q + ".weight" in parse(raw)
            for module in (Q, EXPERT + "down_proj", EXPERT + "gate_proj"):
                status, rows = s.post("/get_weights_by_name", {"name": module + ".weight", "truncate_size": 3})
                assert status == 200 and [ones(r) for r in rows] == [values(have, module, i) for i in range(3)], (base, module)
            whole = s.get("/get_weights_by_name?truncate_size=100000&name=" + Q + ".weight")[1]
            assert len(whole) == have[Q + ".weight"][1][0] and ones(whole[200]) == values(have, Q, 200)
            norm = s.get("/get_weights_by_name?truncate_size=7&name=model.norm.weight")[1]
            assert ones(norm) == [f32(v << 16) for v in struct.unpack("<7H", have["model.norm.weight"][2][:14])]
            for n in [n for n in have if n.startswith(EXPERT + "up_proj.") and n != EXPERT + "up_proj.weight"]:
                assert s.get("/get_weights_by_name?name=" + n)[0] == 200, n
            if "nvfp4" in base:
                name = Q + ".weight_scale_2"
                assert ones(s.get("/get_weights_by_name?name=" + name)[1]) == [struct.unpack("<f", have[name][2])[0]]
                kv = "model.layers.0.self_attn.k_proj.k_scale"
                assert ones(s.get("/get_weights_by_name?name=" + kv)[1]) == [struct.unpack("<f", have[kv][2])[0]]
            for ask, says in (({}, "name"), ({"name": 5}, "name"), ({"name": "model.x"}, "model.x"),
                              ({"name": "model.norm.weight", "truncate_size": -1}, "truncate_size"),
                              ({"name": "model.norm.weight", "format": "pt"}, "format")):
                status, r = s.post("/get_weights_by_name", ask)
                assert status == 400 and says in r["message"], (ask, r)


def test_weights_checker():
    """snapshot, reset, compare, and the way back; other requests are served meanwhile."""
    have = read(EARLY)
    with Server(EARLY) as s:
        before = signature(s)
        refused(s.post("/weights_checker", {"action": "compare"}), "snapshot")
        first = must(s.post("/weights_checker", {"action": "snapshot"}))
        sums = first["ranks"][0]["checksums"]
        assert set(sums) == set(have) and first["per_engine_checksum"] == first["ranks"][0]["per_gpu_checksum"]
        same = {}
        for k, t in have.items():
            same.setdefault(t[2], set()).add(sums[k])
        assert all(len(v) == 1 for v in same.values()) and len(set(sums.values())) == len(same)
        assert must(s.get("/weights_checker?action=compare"))["per_engine_checksum"] == first["per_engine_checksum"]
        change = chosen(have)
        must(send(s, change))
        status, r = s.post("/weights_checker", {"action": "compare", "allow_quant_error": True})
        assert status == 400 and f"{len(change)} tensors" in r["message"] and "checksums" in r["message"], r
        assert {k for k, v in r["ranks"][0]["checksums"].items() if v != sums[k]} == set(change)
        must(s.post("/weights_checker", {"action": "reset_tensors"}))
        assert signature(s) != before
        refused(s.post("/weights_checker", {"action": "compare"}), "differ")
        must(send(s, have))
        assert must(s.post("/weights_checker", {"action": "compare"}))["ranks"] == first["ranks"]
        assert signature(s) == before
        status, r = s.post("/weights_checker", {"action": "other"})
        assert status == 400 and "reset_tensors" in r["message"]
        got = []
        t = threading.Thread(target=lambda: got.append(s.generate([5, 6, 7], 60, ignore_eos=True)["output_ids"]))
        t.start()
        n = 0
        while t.is_alive():
            assert must(s.post("/weights_checker", {}))["ranks"] == first["ranks"]
            n += 1
        t.join()
        assert n >= 1 and got == [s.generate([5, 6, 7], 60, ignore_eos=True)["output_ids"]]


def rss(s):
    """Bytes of this process alone: without the program's own pages."""
    text = open(f"/proc/{s.proc.pid}/status").read()
    return int(re.search(r"RssAnon:\s+(\d+)", text).group(1)) << 10


def memory_peak(s):
    return int(re.search(r"VmHWM:\s+(\d+)", open(f"/proc/{s.proc.pid}/status").read()).group(1)) << 10


def fill_cache(s):
    """Prompts that leave their KV in the prefix cache."""
    for i in range(2):
        s.generate([(i * 131 + j * 7) % 2000 for j in range(1300)], 1, logprobs=False)


def test_release_and_resume():
    """Memory really goes back, addresses and states are as told, nothing is served meanwhile."""
    have = read(EARLY)
    with Server(EARLY) as s:
        status, r = s.post("/release_memory_occupation", {})
        assert status == 400 and "--enable-memory-saver" in r["message"]
        status, r = s.post("/resume_memory_occupation", {})
        assert status == 400 and "--enable-memory-saver" in r["message"]
    with Server(EARLY, "--enable-memory-saver", "--max-total-tokens", "32000") as s:
        s.settle()
        before = signature(s)
        for ask, says in (({"tags": "weights"}, "tags"), ({"tags": ["kv"]}, "kv"), ({"tags": [1]}, "tags")):
            status, r = s.post("/release_memory_occupation", ask)
            assert status == 400 and says in r["message"], r
        fill_cache(s)
        t = time.time()
        while s.get("/server_info")[1]["kv_pages_cached"] < 160 and time.time() - t < 20:
            time.sleep(0.02)  # told at the end of a turn
        assert s.get("/server_info")[1]["kv_pages_cached"] >= 160
        full = rss(s)
        got = []
        t = threading.Thread(target=lambda: got.append(s.generate([5, 6, 7], 200, ignore_eos=True)))
        t.start()
        while s.loads()["num_running_reqs"] == 0 and t.is_alive():
            pass
        status, r = s.post("/release_memory_occupation", {})
        assert status == 400 and "requests hold KV" in r["message"], r
        t.join()
        assert len(got[0]["output_ids"]) == 200
        kv_bytes = 160 * 16 * 3 * 2 * 2 * 128 * 2  # pages, tokens, layers, K and V, heads, dimensions, BF16
        assert s.post("/release_memory_occupation", {"tags": ["kv_cache"]})[1] is None
        assert full - rss(s) > (0 if SLOW else kv_bytes), (full, rss(s), kv_bytes)
        status, r = s.get("/health")
        assert status == 503 and r == {"status": "released", "released": "kv_cache"}, r
        assert s.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})[0] == 503
        assert s.post("/release_memory_occupation", {"tags": ["kv_cache"]})[0] == 200  # again
        small = rss(s)
        assert s.post("/release_memory_occupation", None)[0] == 200  # the rest
        assert small - rss(s) > 10 << 20, (small, rss(s))
        assert s.get("/health")[1]["released"] == "weights, kv_cache, cuda_graph"
        for answer in (send(s, have), s.post("/update_weights_from_disk", {"model_path": EARLY}),
                       s.post("/begin_weight_update", {}), s.post("/weights_checker", {})):
            assert answer[0] in (400, 503) and "released" in answer[1]["message"], answer
        assert s.post("/resume_memory_occupation", {"tags": ["weights"]})[0] == 200
        refused(s.post("/weights_checker", {}), "released")
        refused(send(s, chosen(have)), "missing tensors")  # there is nothing to keep
        must(s.post("/begin_weight_update", {}))
        names = sorted(have)
        must(send(s, {k: have[k] for k in names[::2]}))
        must(send(s, {k: have[k] for k in names[1::2]}))
        must(s.post("/end_weight_update", {}))
        assert s.get("/health")[1]["released"] == "kv_cache, cuda_graph"
        assert s.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})[0] == 200
        assert s.post("/resume_memory_occupation", {})[0] == 200  # again
        assert s.get("/health")[0] == 200 and signature(s) == before
        s.generate(list(range(1000)), 1)
        # once more, with a whole folder after it; a partial update cannot end the state
        assert s.post("/release_memory_occupation", {"tags": ["weights"]})[0] == 200
        assert s.post("/resume_memory_occupation", {"tags": ["weights"]})[0] == 200
        assert s.get("/health")[0] == 503 and s.get("/health")[1] == {"status": "no valid weights"}
        assert s.post("/generate", {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})[0] == 503
        must(s.post("/update_weights_from_disk", {"model_path": EARLY}))
        assert s.get("/health")[0] == 200 and signature(s) == before
        # paused with everything retracted, it may be released; what waits goes on afterwards
        whole = s.generate([5, 6, 7], 400, ignore_eos=True)["output_ids"]
        got = []
        t = threading.Thread(target=lambda: got.append(s.generate([5, 6, 7], 400, ignore_eos=True)))
        t.start()
        while s.loads()["num_running_reqs"] == 0 and t.is_alive():
            pass
        assert s.post("/pause_generation", {"mode": "in_place"})[0] == 200
        held = s.loads()["num_running_reqs"] > 0
        status, r = s.post("/release_memory_occupation", {})
        assert (status == 400 and "requests hold KV" in r["message"]) or not held, r
        assert s.post("/pause_generation", {"mode": "retract"})[0] == 200
        assert s.post("/release_memory_occupation", {})[0] == 200
        assert s.post("/continue_generation", {})[0] == 200  # it waits for the memory
        assert s.post("/resume_memory_occupation", {})[0] == 200
        must(s.post("/update_weights_from_disk", {"model_path": EARLY}))
        t.join()
        assert got[0]["output_ids"] == whole and (got[0]["meta_info"]["num_retractions"] > 0 or not held)
        assert held, "the request ended before the pause"
        assert s.post("/release_memory_occupation", {})[0] == 200  # and it ends in an orderly way


def test_backup_of_weights():
    """With a backup the weights come back by themselves, in every format."""
    p = subprocess.run([MOULT, "serve", "--model-path", EARLY, "--enable-weights-cpu-backup"], capture_output=True, text=True)
    assert p.returncode == 2 and "--enable-memory-saver" in p.stderr, p
    for base in formats("mxfp8-last1-bf16"):
        with Server(base, "--enable-memory-saver", "--enable-weights-cpu-backup", "--max-total-tokens", "8000") as s:
            before, sums = signature(s), must(s.post("/weights_checker", {}))
            for tags in (["weights"], None, ["cuda_graph", "weights"]):
                body = {} if tags is None else {"tags": tags}
                assert s.post("/release_memory_occupation", body)[0] == 200
                assert s.get("/health")[0] == 503
                assert s.post("/resume_memory_occupation", body)[0] == 200
                assert s.get("/health")[0] == 200
                assert must(s.post("/weights_checker", {})) == sums and signature(s) == before
