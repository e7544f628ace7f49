"""Updates beside streams, over HTTP: pause, total time, and what staging costs the streams.

    bench/bench_update.py MODEL NEXT [--streams 64] [--updates 3] [--in-flight continue] [server flags ...]

MODEL is served, updated to NEXT and back.  Printed:
  gap       between two tokens of a stream: median and longest, without an update, while one is staged, and over its
            commit ("silence": the longest time in which no stream at all got a token)
  staging   its time, beside the time to read the same bytes (page cache, 4 MiB at once) and to copy them in memory
  one       gap of a single stream while staging, and of the same tokens of the same request without
Standard library only.  MOULT names the program (build/moult).
"""
import argparse
import glob
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "test", "server"))
os.makedirs("build/log", exist_ok=True)
from harness import Server  # noqa: E402


class Stream(threading.Thread):
    """One request after another; the times at which tokens came."""

    def __init__(self, s, i, tokens):
        super().__init__(daemon=True)
        self.s, self.i, self.tokens = s, i, tokens
        self.times, self.starts, self.end = [], [], False

    def run(self):
        n = 0
        while not self.end:
            c = http.client.HTTPConnection("127.0.0.1", self.s.port, timeout=600)
            n += 1
            body = {"input_ids": [self.i + 1, n % 100 + 1], "stream": True, "incremental_streaming_output": True,
                    "sampling_params": {"temperature": 0, "max_new_tokens": self.tokens, "ignore_eos": True}}
            c.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            r = c.getresponse()
            self.starts.append(len(self.times))
            while not self.end:
                line = r.readline()
                if not line:
                    break
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())
            c.close()


def gaps(streams, t0, t1):
    """Between neighbouring tokens of one request that both came in [t0, t1]."""
    out = []
    for st in streams:
        starts = set(st.starts)
        ts = list(st.times)
        out += [b - a for k, (a, b) in enumerate(zip(ts, ts[1:])) if k + 1 not in starts and a >= t0 and b <= t1]
    return out


def silence(streams, t0, t1):
    ts = sorted([t for st in streams for t in list(st.times) if t0 <= t <= t1])
    return max((b - a for a, b in zip(ts, ts[1:])), default=0)


def show(name, g):
    if g:
        print(f"  gap {name:28} median {statistics.median(g) * 1e3:8.2f} ms, longest {max(g) * 1e3:8.2f} ms ({len(g)} gaps)")


def read_time(folder):
    """Seconds to read every weight byte from the page cache, and to copy as many in memory; best of three."""
    files = sorted(glob.glob(os.path.join(folder, "*.safetensors")))
    buf, best_read, best_copy = bytearray(4 << 20), 1e9, 1e9
    view = memoryview(buf)
    total = sum(os.path.getsize(f) for f in files)
    src, dst = memoryview(bytearray(64 << 20)), memoryview(bytearray(64 << 20))
    for _ in range(3):
        t = time.perf_counter()
        for f in files:
            fd = os.open(f, os.O_RDONLY)
            while os.readv(fd, [view]) > 0:
                pass
            os.close(fd)
        best_read = min(best_read, time.perf_counter() - t)
        t = time.perf_counter()
        left = total
        while left > 0:
            n = min(left, len(src))
            dst[:n] = src[:n]
            left -= n
        best_copy = min(best_copy, time.perf_counter() - t)
    return total, best_read, best_copy


def settle(streams, n):
    while sum(len(st.times) for st in streams) < n:
        time.sleep(0.01)


def one_stream(s, rest):
    st = Stream(s, 0, 100000)
    st.start()
    settle([st], 20)
    time.sleep(rest)
    return st


def stop(s, st):
    st.end = True
    st.join()
    s.idle()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("model")
    p.add_argument("next")
    p.add_argument("--streams", type=int, default=64, help="0: only the measurement beside one stream")
    p.add_argument("--updates", type=int, default=3)
    p.add_argument("--in-flight", default="continue", help="what the commit does with running requests")
    p.add_argument("--tokens", type=int, default=48)
    p.add_argument("--rest", type=float, default=3.0, help="seconds of streaming without an update")
    a, flags = p.parse_known_args()
    total, read_s, copy_s = read_time(a.next)
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    print(f"{a.model} -> {a.next}: {total / 1e6:.1f} MB; commit {commit}; {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    print(f"  the bytes alone: read {read_s:.3f} s, copied in memory {copy_s * 1e3:.2f} ms")
    with Server(a.model, *flags) as s:
        idle, during = [], []
        for k in range(a.updates):
            target = a.model if k % 2 else a.next
            st = one_stream(s, a.rest)
            first, t1 = len(st.times), time.perf_counter()
            code, r = s.post("/stage_weights_from_disk", {"model_path": target})
            t2 = time.perf_counter()
            assert code == 200, r
            print(f"  staged beside one stream in {r['stage_s']:.3f} s, {r['stage_s'] / read_s:.2f} x reading")
            last = len(st.times)
            stop(s, st)
            during += gaps([st], t1, t2)
            assert s.post("/commit_weights", {})[0] == 200
            st = one_stream(s, a.rest)  # the same tokens without: later ones attend to more
            settle([st], last)
            stop(s, st)
            idle += gaps([st], st.times[first], st.times[last - 1])
        show("one stream, idle", idle)
        show("one stream, staging", during)
        if idle and during:
            m = [statistics.median(x) for x in (idle, during)]
            print(f"  staging: median gap x {m[1] / m[0]:.3f}, mean gap x "
                  f"{statistics.fmean(during) / statistics.fmean(idle):.3f}")
        code, r = s.post("/stage_weights_from_disk", {"model_path": a.next})
        assert code == 200, r
        s.post("/discard_staged_weights", {})
        print(f"  staged beside nothing in {r['stage_s']:.3f} s, {r['stage_s'] / read_s:.2f} x reading")
        if a.streams == 0:
            return
        st = [Stream(s, i, a.tokens + i % 8) for i in range(a.streams)]
        for x in st:
            x.start()
        settle(st, 4 * a.streams)
        t0 = time.perf_counter()
        time.sleep(a.rest)
        t1 = time.perf_counter()
        quiet = gaps(st, t0, t1)
        show(f"{a.streams} streams", quiet)
        print(f"  silence without an update       {silence(st, t0, t1) * 1e3:8.2f} ms")
        for k in range(a.updates):
            target = a.model if k % 2 else a.next
            t1 = time.perf_counter()
            code, r = s.post("/stage_weights_from_disk", {"model_path": target})
            assert code == 200, r
            t2 = time.perf_counter()
            code, c = s.post("/commit_weights", {"in_flight": a.in_flight})
            t3 = time.perf_counter()
            assert code == 200, c
            time.sleep(1.0)
            t4 = time.perf_counter()
            show(f"{a.streams} streams, staging", gaps(st, t1, t2))
            show("over the commit", gaps(st, t2, t4))
            pause = max(gaps(st, t2, t4), default=0) - statistics.median(quiet)
            print(f"  update {k + 1}: staged {r['stage_s']:.3f} s, drained {c['drain_s']:.3f} s, swapped {c['swap_s'] * 1e3:.3f} ms "
                  f"({c['swap_s'] / copy_s:.3f} x the copy); extra gap {pause * 1e3:.2f} ms; silence {silence(st, t2, t4) * 1e3:.2f} ms; "
                  f"stage + commit {t3 - t1:.3f} s")
        for x in st:
            x.end = True
        for x in st:
            x.join()


if __name__ == "__main__":
    main()
