"""Updates under load, many, one in ten of them bad: memory and descriptors stay flat, every answer is of one version.

    bench/soak_update.py [COUNT] [--seed 1] [--threads 4] [--rest 0.02]

Also run by test/server/test_staging.py with a small COUNT.  Threads ask for 1 to 24 tokens, rest, and ask again; each
answer must be, bit for bit, what a fresh server with the weights of its `weight_version` gives.  Good updates come as
one call, staged and committed, or staged and then updated; bad ones are a missing folder, a truncated file, a missing
shard, a value that is not finite, a manifest that is not met, or are discarded.  Standard library only.
"""
import argparse
import json
import os
import random
import shutil
import struct
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "test", "server"))
os.makedirs("build/log", exist_ok=True)
from harness import EARLY, FINAL, Server  # noqa: E402

UPDATE, STAGE = "/update_weights_from_disk", "/stage_weights_from_disk"
COMMIT, DISCARD = "/commit_weights", "/discard_staged_weights"
FILE = "model-00001-of-00001.safetensors"
PROMPTS = [([2046, 375, 198], 24), ([32] * 20, 12), (list(range(100, 160)), 8), ([1], 1), ([5, 6, 7, 8], 16)]


def answer(r):
    return [r["output_ids"], r["meta_info"]["output_token_logprobs"]]


def expected(model):
    with Server(model) as s:
        return [answer(s.generate(p, n, ignore_eos=True)) for p, n in PROMPTS]


def bad_folders(root):
    out = {"nowhere": os.path.join(root, "nowhere")}
    for name in ("truncated", "shardless", "not-finite", "manifest"):
        out[name] = os.path.join(root, name)
        shutil.copytree(FINAL, out[name])
    os.truncate(os.path.join(out["truncated"], FILE), 5000000)
    os.remove(os.path.join(out["shardless"], FILE))
    f = os.path.join(out["not-finite"], FILE)
    raw = bytearray(open(f, "rb").read())
    n = int.from_bytes(raw[:8], "little")
    at = 8 + n + json.loads(bytes(raw[8:8 + n]))["model.norm.weight"]["data_offsets"][0]
    raw[at:at + 2] = struct.pack("<H", 0x7f80)
    open(f, "wb").write(raw)
    json.dump({"files": {FILE: {"xxh3-128": "0" * 32}}}, open(os.path.join(out["manifest"], "sums.json"), "w"))
    return out


class Soak:
    def __init__(self, s, want, seed, rest):
        self.s, self.want, self.rng, self.rest = s, want, random.Random(seed), rest
        self.stop, self.answers, self.wrong = False, [0, 0], []
        self.resident = 0

    def ask(self, seed):
        rng = random.Random(seed)
        while not self.stop:
            i = rng.randrange(len(PROMPTS))
            p, n = PROMPTS[i]
            try:
                r = self.s.generate(p, n, ignore_eos=True)
            except Exception as e:  # noqa: BLE001
                self.wrong.append(repr(e)[:300])
                return
            version = r["meta_info"]["weight_version"]
            which = 0 if version == "default" else int(version.split("-")[0])
            self.answers[which] += 1
            if answer(r) != self.want[which][i]:
                self.wrong.append(f"prompt {i} under version {version}")
            time.sleep(self.rest)

    def good(self, k):
        s, which = self.s, self.rng.randrange(2)
        path, version = (EARLY, FINAL)[which], f"{which}-{k}"
        how = self.rng.choice(("update", "commit", "both", "abort"))
        if how in ("commit", "both"):
            code, r = s.post(STAGE, {"model_path": path, "weight_version": version})
            assert code == 200, r
        if how == "commit":
            code, r = s.post(COMMIT, {})
        else:
            code, r = s.post(UPDATE, {"model_path": path, "weight_version": version})
            assert code != 200 or r["was_staged"] is (how == "both"), r
        assert code == 200, (how, r)
        self.resident = which

    def bad(self, k, folders):
        s, name = self.s, self.rng.choice(sorted(folders) + ["discard"])
        if name == "discard":
            assert s.post(STAGE, {"model_path": FINAL})[0] == 200
            code, r = s.post(DISCARD, {})
            assert code == 200, r
            return
        body = {"model_path": folders[name], "weight_version": f"bad-{k}"}
        if name == "manifest":
            body["manifest"] = "sums.json"
        code, r = s.post(self.rng.choice((UPDATE, STAGE)), body)
        assert code == 400 and r["success"] is False, (name, r)

    def watch(self):
        pid = self.s.proc.pid
        status = open(f"/proc/{pid}/status").read()
        field = lambda name: int(status.split(name + ":")[1].split()[0])
        return field("VmRSS"), len(os.listdir(f"/proc/{pid}/fd")), field("Threads")


def run(count, seed=1, threads=4, rest=0.02, model=EARLY, tell=print):
    want = [expected(EARLY), expected(FINAL)]
    with tempfile.TemporaryDirectory() as root, Server(model, "--max-total-tokens", "16384") as s:
        soak, folders, t0 = Soak(s, want, seed, rest), bad_folders(root), time.time()
        ts = [threading.Thread(target=soak.ask, args=(seed * 1000 + i,), daemon=True) for i in range(threads)]
        for t in ts:
            t.start()
        seen, n_bad = [], 0
        for k in range(count):
            if k % 10 == 9:
                n_bad += 1
                soak.bad(k, folders)
            else:
                soak.good(k)
            if k % max(1, count // 20) == count // 20 - 1 or k + 1 == count:
                seen.append((k + 1, *soak.watch()))
                tell(f"  {k + 1:6} updates, {time.time() - t0:7.1f} s: RSS {seen[-1][1] / 1024:.1f} MiB, {seen[-1][2]} descriptors, "
                     f"{seen[-1][3]} threads, {sum(soak.answers)} answers, {len(soak.wrong)} wrong", flush=True)
            if soak.wrong:
                break
        soak.stop = True
        for t in ts:
            t.join()
        assert not soak.wrong, soak.wrong[:5]
        s.idle()
        assert s.post("/flush_cache", "{}")[0] == 200
        info = s.get("/server_info")[1]
        assert info["kv_pages_free"] == info["kv_pages_total"], info
        final = [answer(s.generate(p, n, ignore_eos=True)) for p, n in PROMPTS]
        assert final == want[soak.resident], "the weights at the end"
        idle = soak.watch()
        tell(f"  {count} updates, {n_bad} of them bad, seed {seed}: {soak.answers[0]} + {soak.answers[1]} answers, none of a mixture; "
             f"idle at the end: RSS {idle[0] / 1024:.1f} MiB, {idle[1]} descriptors, {idle[2]} threads", flush=True)
        return seen, soak.answers


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("count", nargs="?", type=int, default=10000)
    p.add_argument("--seed", type=int, default=1)
    p.add_argument("--threads", type=int, default=4)
    p.add_argument("--rest", type=float, default=0.02, help="seconds between two requests of a thread")
    a = p.parse_args()
    seen, _ = run(a.count, a.seed, a.threads, a.rest)
    early = [x for x in seen if x[0] >= a.count // 4]
    grown = early[-1][1] - early[0][1]
    print(f"  RSS since update {early[0][0]}: {grown:+d} KiB")
