"""A server over real files: time to ready, and updates beside streams.

    bench/update_gpu.py A B [--streams 64] [--json FILE] [--checksums] [server flags ...]

A and B are checkpoints of one shape with other weights (build/bench/random_checkpoint).  A is served; then, with a client
that holds --streams streams open throughout:
    1  /update_weights_from_disk to B, requests continue
    2  what trainers do with SGLang: /pause_generation in place, /update_weights_from_disk to A, /continue_generation
    3  /stage_weights_from_disk of B, then /commit_weights
Printed and recorded of each: its time, stage_s and swap_s as the server tells them, and of the streams the longest gap
between two tokens of one, less the median gap before ("pause"), and the longest time in which none got a token
("silence").  After each the checksum of the reply must be that of the folder, and tensors of the first, a middle and
the last layer are read back and compared with the folder's bytes.  --checksums also hashes all resident weights
(/weights_checker) after 1 and 3.  The time to read every byte with 16 threads is printed beside.
Standard library only.  MOULT names the program (build/moult).
"""
import argparse
import glob
import http.client
import json
import os
import random
import selectors
import signal
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

MOULT = os.environ.get("MOULT", "build/moult")


class Checkpoint:
    """The bytes of a folder's tensors."""

    def __init__(self, folder):
        self.folder, self.places = folder, {}
        self.files = sorted(glob.glob(os.path.join(folder, "*.safetensors")))
        for path in self.files:
            with open(path, "rb") as f:
                n = struct.unpack("<Q", f.read(8))[0]
                for name, t in json.loads(f.read(n)).items():
                    if name != "__metadata__":
                        a, b = t["data_offsets"]
                        self.places[name] = (path, 8 + n + a, b - a)

    def read(self, name):
        path, at, n = self.places[name]
        with open(path, "rb") as f:
            f.seek(at)
            return f.read(n)

    def sample(self):
        """Weights of some layers and experts, and the last norm."""
        layers = sorted({int(n.split(".")[2]) for n in self.places if n.startswith("model.layers.")})
        tails = ["self_attn.q_proj.weight", "self_attn.o_proj.weight", "mlp.gate.weight", "mlp.experts.0.gate_proj.weight",
                 "mlp.experts.7.down_proj.weight", "post_attention_layernorm.weight"]
        names = [f"model.layers.{i}.{t}" for i in (layers[0], layers[len(layers) // 2], layers[-1]) for t in tails]
        return [n for n in names + ["model.norm.weight"] if n in self.places]

    def read_s(self):
        """Seconds to read it all from the page cache, 4 MiB at once, 16 threads."""
        jobs = [(p, at) for p in self.files for at in range(0, os.path.getsize(p), 64 << 20)]

        def job(j):
            buf = memoryview(bytearray(4 << 20))
            fd = os.open(j[0], os.O_RDONLY)
            for at in range(j[1], j[1] + (64 << 20), 4 << 20):
                if os.preadv(fd, [buf], at) <= 0:
                    break
            os.close(fd)
        t = time.perf_counter()
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(job, jobs))
        return time.perf_counter() - t


class Streams(threading.Thread):
    """n requests open at once over plain sockets; (time, stream) of every token."""

    def __init__(self, port, n, tokens, vocab):
        super().__init__(daemon=True)
        self.port, self.n, self.tokens, self.vocab = port, n, tokens, vocab
        self.events, self.end, self.failure = [], False, None

    def open(self, sel, i):
        rng = random.Random(len(self.events) * 64 + i)
        body = json.dumps({"input_ids": [rng.randrange(self.vocab) for _ in range(64)], "stream": True,
                           "incremental_streaming_output": True,
                           "sampling_params": {"temperature": 0, "max_new_tokens": self.tokens, "ignore_eos": True}})
        s = socket.create_connection(("127.0.0.1", self.port))
        s.sendall((f"POST /generate HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
                   f"Content-Length: {len(body)}\r\n\r\n{body}").encode())
        s.setblocking(False)
        sel.register(s, selectors.EVENT_READ, [i, b"", True])

    def run(self):
        sel = selectors.DefaultSelector()
        for i in range(self.n):
            self.open(sel, i)
        while not self.end:
            for key, _ in sel.select(0.05):
                data = key.fileobj.recv(1 << 16)
                now = time.perf_counter()
                i, tail, first = key.data
                if not data:
                    sel.unregister(key.fileobj)
                    key.fileobj.close()
                    self.open(sel, i)
                    continue
                if first and b" 200 " not in data[:16]:
                    self.failure = data[:400]
                    return
                data = tail + data
                count = data.count(b"data: {")
                key.data[1], key.data[2] = data[-6:], False
                if count:
                    self.events.append((now, i, count, first))
        for key in list(sel.get_map().values()):
            key.fileobj.close()

    def between(self, t0, t1):
        """Gaps between neighbouring tokens of one stream that meet [t0, t1], and the longest silence."""
        last, gaps, before, silence = {}, [], None, 0.0
        for t, i, _, first in list(self.events):
            if i in last and not first and t >= t0 and last[i] <= t1:
                gaps.append(t - last[i])
            if before is not None and t >= t0 and before <= t1:
                silence = max(silence, t - before)
            last[i] = before = t
        return gaps, silence


class Server:
    def __init__(self, model, flags):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = s.getsockname()[1]
        self.log = f"/tmp/update-gpu-{self.port}.log"
        t0 = time.perf_counter()
        self.proc = subprocess.Popen([MOULT, "serve", "--model-path", model, "--port", str(self.port), *flags],
                                     stdout=open(self.log, "w"), stderr=subprocess.STDOUT)
        while True:
            if self.proc.poll() is not None:
                sys.exit("the server ended:\n" + open(self.log).read())
            try:
                if self.ask("GET", "/health")[0] == 200:
                    break
            except OSError:
                pass
            time.sleep(0.005)
        self.ready_s = time.perf_counter() - t0

    def ask(self, method, path, body=None, raw=False):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        c.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        data = r.read()
        c.close()
        if raw:
            return r.status, data
        try:
            return r.status, json.loads(data)
        except ValueError:
            return r.status, data.decode()

    def must(self, path, body):
        status, r = self.ask("POST", path, body)
        if status != 200:
            sys.exit(f"{path}: {status} {r}")
        return r

    def compare(self, ck):
        """Resident bytes of the sampled weights, with their scales, against the folder's."""
        n = 0
        for name in ck.sample():
            status, data = self.ask("POST", "/get_weights_by_name", {"name": name, "format": "bytes"}, raw=True)
            if status != 200:
                sys.exit(f"/get_weights_by_name {name}: {status} {data[:200]}")
            head = struct.unpack("<Q", data[:8])[0]
            for t, v in json.loads(data[8:8 + head]).items():
                if t == "__metadata__":
                    continue
                a, b = v["data_offsets"]
                if t not in ck.places:
                    sys.exit(f"{t}: resident, not in {ck.folder}")
                if data[8 + head + a:8 + head + b] != ck.read(t):
                    sys.exit(f"{t}: the resident bytes are not those of {ck.folder}")
                n += 1
        return n

    def stop(self):
        self.proc.terminate()
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()
            self.proc.wait()


class Bench:
    def __init__(self, a, flags):
        self.a, self.flags, self.out = a, flags, open(a.json, "a") if a.json else None
        self.sums = {}
        self.cks = [Checkpoint(a.a), Checkpoint(a.b)]
        self.bytes = sum(os.path.getsize(f) for f in self.cks[0].files)
        self.s = Server(a.a, flags)

    def record(self, **fields):
        if self.out:
            self.out.write(json.dumps({"bench": "serve", "gb": self.bytes / 1e9, "flags": " ".join(self.flags), **fields}) + "\n")
            self.out.flush()

    def verify(self, which, reply):
        other = self.sums.get(1 - which)
        if reply["checksum"] == other or self.sums.setdefault(which, reply["checksum"]) != reply["checksum"]:
            sys.exit(f"checksum {reply['checksum']}: {self.sums}")
        return self.s.compare(self.cks[which])

    def timed(self, name, which, calls, st):
        q0 = time.perf_counter()
        time.sleep(self.a.rest)
        t0 = time.perf_counter()
        quiet, quiet_silence = st.between(q0, t0)
        replies = [self.s.must(*c) for c in calls]
        t1 = time.perf_counter()
        time.sleep(0.5)
        if st.failure:
            sys.exit(f"a stream failed: {st.failure}")
        gaps, silence = st.between(t0, t1 + 0.2)
        reply = next(r for r in reversed(replies) if isinstance(r, dict) and "checksum" in r)
        usual = statistics.median(quiet)
        pause = max(gaps) - usual
        print(f"{name}: {t1 - t0:.3f} s; staged {reply['stage_s']:.3f} s, drained {reply['drain_s']:.4f} s, swapped "
              f"{reply['swap_s'] * 1e3:.2f} ms; longest gap {max(gaps) * 1e3:.1f} ms, usual {usual * 1e3:.1f} (longest "
              f"{max(quiet) * 1e3:.1f}): pause {pause * 1e3:.1f} ms; silence {silence * 1e3:.1f} ms (without "
              f"{quiet_silence * 1e3:.1f}); median gap meanwhile {statistics.median(gaps) * 1e3:.1f} ms", flush=True)
        n = self.verify(which, reply)
        print(f"  checksum {reply['checksum']}, {n} tensors read back equal", flush=True)
        self.record(what=name, streams=self.a.streams, total_s=t1 - t0, stage_s=reply["stage_s"], drain_s=reply["drain_s"],
                    swap_ms=reply["swap_s"] * 1e3, pause_ms=pause * 1e3, usual_gap_ms=usual * 1e3,
                    longest_quiet_gap_ms=max(quiet) * 1e3, silence_ms=silence * 1e3,
                    meanwhile_gap_ms=statistics.median(gaps) * 1e3, checksum=reply["checksum"], compared=n)

    def checksums(self, when):
        if self.a.checksums:
            t = time.perf_counter()
            r = self.s.must("/weights_checker", {"action": "checksum"})
            total = [x["per_gpu_checksum"] for x in r["ranks"]]
            print(f"  all resident weights {when}: {total} in {time.perf_counter() - t:.1f} s", flush=True)

    def run(self):
        s = self.s
        print("\n".join(line for line in open(s.log).read().splitlines() if "H200" in line or "ready" in line or "GB" in line))
        print(f"ready in {s.ready_s:.2f} s, {self.bytes / 1e9:.2f} GB", flush=True)
        self.record(what="ready", seconds=s.ready_s)
        print(f"read from the page cache by 16 threads: {self.cks[1].read_s():.2f} s", flush=True)
        print(f"{s.compare(self.cks[0])} tensors read back equal", flush=True)
        a, b = os.path.abspath(self.a.a), os.path.abspath(self.a.b)
        vocab = json.load(open(os.path.join(a, "config.json")))["vocab_size"]
        st = Streams(s.port, self.a.streams, self.a.tokens, vocab)
        st.start()
        while len({e[1] for e in list(st.events)}) < self.a.streams:
            if st.failure:
                sys.exit(f"a stream failed: {st.failure}")
            time.sleep(0.02)
        self.timed("update_weights_from_disk, requests continue", 1,
                   [("/update_weights_from_disk", {"model_path": b, "in_flight": "continue"})], st)
        self.checksums("of B")
        self.timed("pause in place, update_weights_from_disk, continue", 0,
                   [("/pause_generation", {"mode": "in_place"}),
                    ("/update_weights_from_disk", {"model_path": a, "flush_cache": True, "abort_all_requests": False,
                                                   "weight_version": "2"}),
                    ("/continue_generation", {})], st)
        self.timed("staged, then committed", 1,
                   [("/stage_weights_from_disk", {"model_path": b}), ("/commit_weights", {"in_flight": "continue"})], st)
        self.checksums("of B again")
        st.end = True
        st.join()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("a")
    p.add_argument("b")
    p.add_argument("--streams", type=int, default=64)
    p.add_argument("--tokens", type=int, default=2000)
    p.add_argument("--rest", type=float, default=1.5, help="seconds of streaming before each update")
    p.add_argument("--json")
    p.add_argument("--checksums", action="store_true")
    a, flags = p.parse_known_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    b = Bench(a, flags)
    try:
        b.run()
    finally:
        b.s.stop()


if __name__ == "__main__":
    main()
