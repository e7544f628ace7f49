"""What Miles and slime do with an external engine and disk transport, call by call and field by field
(docs/sync.md): start, comparison of /server_info, pull, pause, flush, update, continue."""
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time

from harness import EARLY, FINAL, MOULT, SLOW, Server, signature

try:
    import deltas
except ImportError as e:
    deltas = None
    print(f"skip    test_trainers: needs {e.name} (test/requirements.txt)")

BEARER = {"Authorization": "Bearer None"}  # sent literally by a trainer without a key


def absent(s, *paths):
    for p in paths:
        if s.post(p, {})[0] == 404:
            print(f"skip    {p}: no such route yet")
            return True
    return False


class Trainer:
    """One engine as a trainer drives it.  Every reply but those of flush and health must be 2xx with JSON."""

    def __init__(self, s, source, local):
        self.s, self.source, self.local, self.pauses = s, source, local, True

    def call(self, path, body):
        status, r = self.s.post(path, body)
        assert status == 200 and isinstance(r, dict), (path, status, r)
        return r

    def wait(self):
        for path in ("/health_generate", "/flush_cache"):
            while self.s.get(path, headers=BEARER)[0] != 200:
                time.sleep(0.05)

    def pull(self, version):
        r = self.call("/pull_weights", {"local_checkpoint_dir": self.local, "source_dir": self.source,
                                        "target_version": version})
        assert r["success"] is True and isinstance(r["message"], str), r
        return r

    def pause(self, body):
        r = self.call("/pause_generation", body)
        assert r["status"] == "ok", r

    def flush(self):
        for _ in range(60):
            if self.s.get("/flush_cache")[0] == 200:
                return
            time.sleep(0.1)
        raise AssertionError("the cache was not flushed")

    def update(self, path, version):
        r = self.call("/update_weights_from_disk", {"model_path": path, "weight_version": str(version)})
        assert r["success"] is True, r
        return r

    def resume(self):
        assert self.call("/continue_generation", {})["status"] == "ok"

    def version(self):
        """Miles asks /model_info first, slime /get_weight_version."""
        a, b = (self.s.get(p)[1]["weight_version"] for p in ("/model_info", "/get_weight_version"))
        assert a == b, (a, b)
        return a

    def miles_delta(self, version, mode="retract"):
        self.pull(version)
        if self.pauses:
            self.pause({"mode": mode})
            if mode != "in_place":
                self.flush()
        r = self.update(self.local, version)
        assert r["was_staged"] is True and r["epoch"] > 0, r  # the pull has read and checked it
        if self.pauses:
            self.resume()

    def slime_disk(self, version, local):
        """slime's full mode: the folder is removed as soon as the update was answered, before generation goes on."""
        folder = os.path.join(self.source, f"weight_v{version:06d}")
        if local:
            self.pull(version)
        if self.pauses:
            self.pause({})
        else:
            self.s.idle(300)
        self.flush()
        self.update(self.local if local else folder, version)
        assert self.version() == str(version)
        shutil.rmtree(folder)
        if self.pauses:
            self.resume()


def mixed(old, new, part):
    """Some tensors of `new`, the others of `old`: every third, two of three, ..., all."""
    return {n: new[n] if i % 3 < part else old[n] for i, n in enumerate(sorted(old))}


def fresh_signature(folder):
    with Server(folder) as s:
        return signature(s)


def same_bytes(local, want):
    got = deltas.tensors(local)
    assert got.keys() == want.keys()
    wrong = [n for n in want if got[n] != want[n]]
    assert not wrong, wrong


def test_miles_deltas():
    """Baseline pull(0), then three deltas, xor; a request runs on through each."""
    if not deltas:
        return
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as s:
        pub = deltas.Publisher(root + "/source", EARLY)
        old, new = pub.now.copy(), deltas.tensors(FINAL)
        t = Trainer(s, pub.source, root + "/nvme/local")
        t.wait()
        t.pauses = not absent(s, "/pause_generation", "/continue_generation")
        r = t.pull(0)
        same_bytes(t.local, old)
        for part in (1, 2, 3):
            pub.delta(mixed(old, new, part))
            out = {}
            busy = threading.Thread(target=lambda: out.update(s.generate([5, 6, 7], 300, ignore_eos=True)))
            busy.start()
            t.miles_delta(part, "in_place" if part == 2 else "retract")
            busy.join()
            assert len(out["output_ids"]) == 300 and out["meta_info"]["finish_reason"]["type"] == "length", out["meta_info"]
            same_bytes(t.local, pub.now)
            assert t.version() == str(part)
            assert json.load(open(t.local + "/.weight_sync/state.json")) == {"version": f"{part:06d}"}
        assert signature(s) == fresh_signature(FINAL)
        assert s.get("/model_info")[1]["model_path"] == t.local
        # A trainer that starts again clears its stream; the engine must not keep the old one's bytes.
        pub = deltas.Publisher(root + "/source", EARLY, "overwrite", "adler32", ranks=1)
        r = t.pull(0)
        assert r["version"] == 0, r
        same_bytes(t.local, old)
        pub.delta(mixed(old, new, 1))
        pub.delta(mixed(old, new, 1))  # nothing has changed: an empty map
        t.miles_delta(2)
        whole = deltas.with_tensors(EARLY, root + "/whole", mixed(old, new, 1))
        same_bytes(t.local, deltas.tensors(whole))
        shutil.rmtree(t.local)
        shutil.rmtree(t.source)
        assert signature(s) == fresh_signature(whole)


def test_slime_full():
    """Whole checkpoints, read where they lie or pulled; both are deleted right after the reply."""
    if not deltas:
        return
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as s:
        pub = deltas.Publisher(root + "/source", EARLY)
        t = Trainer(s, pub.source, root + "/local")
        t.pauses = not absent(s, "/pause_generation", "/continue_generation")
        before = signature(s)
        pub.whole(FINAL)
        out = {}
        busy = threading.Thread(target=lambda: out.update(s.generate([5, 6, 7], 2000, ignore_eos=True)))
        busy.start()
        while s.loads()["num_running_reqs"] == 0:
            time.sleep(0.01)
        t.slime_disk(1, local=False)
        busy.join()
        assert out["meta_info"]["finish_reason"]["type"] == ("abort" if t.pauses else "length"), out["meta_info"]
        after = signature(s)
        assert after == fresh_signature(FINAL) and after != before
        pub.whole(EARLY)
        t.slime_disk(2, local=True)
        assert signature(s) == before and os.listdir(pub.source) == []
        pub.whole(FINAL)
        t.slime_disk(3, local=True)
        assert signature(s) == after
        assert sorted(os.listdir(t.local)) == sorted([".weight_sync"] + os.listdir(FINAL))


def quantized(root, name, *flags):
    out = []
    for i, src in enumerate((EARLY, FINAL)):
        d = f"{root}/{name}-{i}"
        subprocess.run([MOULT, "quantize", src, d, *flags], check=True, capture_output=True, timeout=300)
        out.append(d)
    return out


def test_deltas_of_every_format():
    """NVFP4, MXFP8 and FP8: packed codes and scales change like any bytes; after the deltas the server is bit for bit
    a fresh one on the whole checkpoint."""
    if not deltas:
        return
    forms = (("nvfp4", "xor", "xxh3-128", ["--format", "nvfp4", "--spelling", "modelopt"]),
             ("mxfp8", "overwrite", "adler32", ["--format", "mxfp8", "--spelling", "miles", "--bf16-last-n", "1"]),
             ("fp8", "overwrite", "xxh3-128", ["--format", "fp8-block", "--spelling", "hf"]))
    with tempfile.TemporaryDirectory() as root:
        for name, encoding, checksum, flags in forms[:1] if SLOW else forms:
            base, final = quantized(root, name, *flags)
            with Server(base) as s:
                pub = deltas.Publisher(f"{root}/{name}-source", base, encoding, checksum)
                old, new = pub.now.copy(), deltas.tensors(final)
                t = Trainer(s, pub.source, f"{root}/{name}-local")
                t.pauses = False
                t.pull(0)
                pub.delta(mixed(old, new, 2))
                pub.delta(new)
                t.miles_delta(2)
                same_bytes(t.local, new)
                assert signature(s) == fresh_signature(final), name


def test_refused_pulls():
    """400 with success false and the reason; the weights and the local folder stay, and the next pull works."""
    if not deltas:
        return
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as s:
        pub = deltas.Publisher(root + "/source", EARLY)
        t = Trainer(s, pub.source, root + "/local")
        t.pull(0)
        old, new = pub.now.copy(), deltas.tensors(FINAL)
        folder = pub.delta(mixed(old, new, 1))
        good = {"local_checkpoint_dir": t.local, "source_dir": t.source, "target_version": 1}
        file = sorted(f for f in os.listdir(folder) if f != deltas.INDEX)[0]
        raw = open(os.path.join(folder, file), "rb").read()
        broken = raw[:-9] + bytes([raw[-9] ^ 64]) + raw[-8:]
        for data, says in ((broken, "tensor "), (raw[:-1], file), (b"", file)):
            open(os.path.join(folder, file), "wb").write(data)
            status, r = s.post("/pull_weights", good)
            assert status == 400 and r["success"] is False and says in r["message"], (status, r)
            same_bytes(t.local, old)
        open(os.path.join(folder, file), "wb").write(raw)
        for change, says in (({"target_version": 2}, "weight_v000002"), ({"source_dir": root + "/none"}, "weight_v000001"),
                             ({"local_checkpoint_dir": "local"}, "local_checkpoint_dir"), ({"source_dir": "x/y"}, "source_dir")):
            status, r = s.post("/pull_weights", dict(good, **change))
            assert status == 400 and r["success"] is False and says in r["message"], (change, status, r)
        for change, says in (({"target_version": None}, "target_version"), ({"target_version": -1}, "target_version"),
                             ({"target_version": "1"}, "target_version"), ({"target_version": True}, "target_version"),
                             ({"source_dir": 5}, "source_dir"), ({"local_checkpoint_dir": None}, "local_checkpoint_dir")):
            status, r = s.post("/pull_weights", dict(good, **change))
            assert status == 400 and r["object"] == "error" and says in r["message"], (change, status, r)
        same_bytes(t.local, old)
        before = signature(s)
        t.pull(1)
        same_bytes(t.local, pub.now)
        assert signature(s) == before, "a pull alone changes nothing that is served"
    with tempfile.TemporaryDirectory() as root, Server(EARLY, "--allowed-path", root, "--admin-api-key", "k") as s:
        body = {"local_checkpoint_dir": root + "/local", "source_dir": root, "target_version": 0}
        assert s.post("/pull_weights", body, headers=BEARER)[0] == 401
        key = {"Authorization": "Bearer k"}
        for field in ("local_checkpoint_dir", "source_dir"):
            status, r = s.post("/pull_weights", dict(body, **{field: "/tmp/elsewhere"}), headers=key)
            assert status == 400 and "--allowed-path" in json.dumps(r) and not os.path.exists("/tmp/elsewhere"), (status, r)
        assert s.post("/pull_weights", body, headers=key)[0] == 200


def test_engines_of_one_host():
    """Two servers share the local folder: both are asked at once, the bytes change once."""
    if not deltas:
        return
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as a, Server(EARLY) as b:
        pub = deltas.Publisher(root + "/source", EARLY)
        new = deltas.tensors(FINAL)
        both = [Trainer(s, pub.source, root + "/local") for s in (a, b)]
        for version in (0, 1):
            if version:
                pub.delta(new)
            got = []
            ts = [threading.Thread(target=lambda t=t: got.append(t.pull(version))) for t in both]
            for t in ts:
                t.start()
            for t in ts:
                t.join()
            assert len(got) == 2 and all(r["version"] == version for r in got), got
        assert sorted(r["deltas"] for r in got) == [0, 1], got
        same_bytes(root + "/local", new)
        for t in both:
            t.update(t.local, 1)
        assert signature(a) == signature(b)


def test_pull_beside_updates():
    """What is staged by others stays and the pull tells; what an earlier pull staged is replaced; 0 drops it."""
    if not deltas:
        return
    with tempfile.TemporaryDirectory() as root, Server(EARLY) as s:
        def state():
            return s.get("/weight_update_status")[1]["state"]
        pub = deltas.Publisher(root + "/source", EARLY)
        old, new = pub.now.copy(), deltas.tensors(FINAL)
        t = Trainer(s, pub.source, root + "/local")
        before = signature(s)
        r = t.pull(0)
        assert r["staged"] is False and "version 0" in r["not_staged"] and state() == "idle", r
        pub.delta(mixed(old, new, 1))
        assert s.post("/stage_weights_from_disk", {"model_path": FINAL})[0] == 200
        r = t.pull(1)
        assert r["staged"] is False and FINAL in r["not_staged"], r
        same_bytes(t.local, pub.now)
        assert s.post("/commit_weights", {"model_path": FINAL})[0] == 200  # theirs is whole
        want = signature(s)
        r = t.pull(1)
        assert r["staged"] is True and r["deltas"] == 0 and state() == "staged", r
        pub.delta(new)
        r = t.pull(2)
        assert r["staged"] is True and r["deltas"] == 1, r
        assert t.update(t.local, 2)["was_staged"] is True
        assert signature(s) == want != before
        pub.delta(old)
        assert t.pull(3)["staged"] is True
        t.pull(0)
        assert state() == "idle"
        outcomes = [u["outcome"] for u in s.get("/weight_update_status")[1]["updates"]]
        assert outcomes == ["discarded", "committed", "discarded", "committed"], outcomes


def compare(s, wanted):
    """As both trainers do: equal values, so equal types in Python's sense; False is not None."""
    for path in ("/server_info", "/get_server_info"):
        info = s.get(path)[1]
        for name, value in wanted.items():
            assert name in info and info[name] == value and type(info[name]) is type(value), (path, name, value, info.get(name))
    return info


def test_external_engine_fields():
    """What Miles compares one by one and slime reads before they use an engine that they did not start."""
    with Server(EARLY) as s:
        compare(s, {"host": "127.0.0.1", "port": s.port, "nnodes": 1, "node_rank": 0, "base_gpu_id": 0, "gpu_id_step": 1,
                    "tp_size": 1, "dp_size": 1, "pp_size": 1, "ep_size": 1, "enable_memory_saver": False,
                    "enable_return_routed_experts": False, "moe_dp_size": 1, "disaggregation_mode": "null",
                    "encoder_only": False, "dtype": "auto", "load_format": "auto", "model_path": EARLY,
                    "served_model_name": EARLY, "status": "ready"})
    with Server(EARLY, "--enable-return-routed-experts", "--enable-memory-saver") as s:
        compare(s, {"enable_return_routed_experts": True, "enable_memory_saver": True})
    told = ["host=10.1.2.3", "port=31000", "tp_size=8", "ep_size=8", "base_gpu_id=4", "nnodes=2", "dist_init_addr=null",
            "num_gpus=8", "note=x=y", 'list=[1,"a"]', "empty="]
    with Server(EARLY, *[a for t in told for a in ("--server-info", t)]) as s:
        info = compare(s, {"host": "10.1.2.3", "port": 31000, "tp_size": 8, "ep_size": 8, "base_gpu_id": 4, "nnodes": 2,
                           "num_gpus": 8, "note": "x=y", "list": [1, "a"], "empty": "", "pp_size": 1, "node_rank": 0})
        assert info["dist_init_addr"] is None
    for pair, says in (("model_path=/x", "model_path"), ("max_running_requests=9", "max-running-requests"),
                       ("enable_memory_saver=true", "enable-memory-saver"), ("enable_return_routed_experts=true", "enable-return-routed-experts"),
                       ("weight_version=9", "weight-version"), ("page_size=1", "page-size"), ("epoch=5", "fact"), ("api_key=x", "api-key"),
                       ("tp_size", "KEY=VALUE"), ("=1", "KEY=VALUE"), ("Tp=1", "KEY=VALUE"), ('a"b=1', "KEY=VALUE")):
        p = subprocess.run([MOULT, "serve", "--model-path", EARLY, "--port", "0", "--server-info", pair],
                           capture_output=True, text=True, timeout=60)
        assert p.returncode == 2 and "--server-info" in p.stderr and says in p.stderr, (pair, p.returncode, p.stderr)
    p = subprocess.run([MOULT, "serve", "--model-path", EARLY, "--port", "0", "--server-info", "tp_size=2", "--server-info",
                        "tp_size=4"], capture_output=True, text=True, timeout=60)
    assert p.returncode == 2 and "twice" in p.stderr, p.stderr
