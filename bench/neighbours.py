"""What odd requests cost those beside them (cases C29, C37 and C51 of test/CASES.md).

    python3 bench/neighbours.py [MODEL] [--rounds 9] [server flags ...]

Eight streams run throughout.  In turn, --rounds times, something runs beside them for its time, and beside it the same without
the oddity; printed is the streams' gap between two tokens, median and p99, and the median over rounds of the ratio:
  logit_bias   a request with the largest map that is taken, beside one without
  long run     /tokenize of 1 MB of one character, beside 1 MB of words
Then the time of a JSON body of n keys, n doubling: it must double, too.
Standard library only.  MOULT names the program (build/moult).
"""
import argparse
import http.client
import json
import os
import statistics
import sys
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "test", "server"))
os.makedirs("build/log", exist_ok=True)
from harness import Server  # noqa: E402

STREAMS, BIASES, RUN_BYTES = 8, 4096, 1 << 20


class Stream(threading.Thread):
    def __init__(self, s, i):
        super().__init__(daemon=True)
        self.s, self.i, self.times, self.end = s, i, [], False

    def run(self):
        while not self.end:
            c = http.client.HTTPConnection("127.0.0.1", self.s.port, timeout=600)
            c.request("POST", "/generate", json.dumps({"input_ids": [5 + self.i], "stream": True, "incremental_streaming_output": True, "sampling_params": {
                "temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}}), {"Content-Type": "application/json"})
            r = c.getresponse()
            while not self.end and (line := r.readline()):
                if line.startswith(b"data: {"):
                    self.times.append(time.perf_counter())
            c.close()
            self.times.append(None)


def gaps(streams, t0, t1):
    out = []
    for st in streams:
        times = list(st.times)
        out += [b - a for a, b in zip(times, times[1:]) if a and b and a < t1 and b > t0]
    return sorted(out) or [0.0]


def measured(streams, what):
    t0 = time.perf_counter()
    what()
    g = gaps(streams, t0, time.perf_counter())
    return statistics.median(g), g[len(g) * 99 // 100]


def compare(name, streams, odd, plain, rounds):
    rows = [(measured(streams, odd), measured(streams, plain)) for _ in range(rounds)]
    for k, which in enumerate(("median", "p99")):
        a, b = (statistics.median(r[i][k] for r in rows) for i in (0, 1))
        ratio = statistics.median(r[0][k] / r[1][k] for r in rows)
        print(f"{name:11} gap {which:6} {1e3 * a:7.2f} ms, beside the plain one {1e3 * b:7.2f} ms: x {ratio:.2f}", flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", nargs="?", default="models/tiny-moe")
    p.add_argument("--rounds", type=int, default=9)
    a, flags = p.parse_known_args()
    with Server(a.model, *flags) as s:
        def ask(extra):
            code, r = s.post("/generate", {"input_ids": [9], "sampling_params": {"temperature": 0, "max_new_tokens": 300, "ignore_eos": True, **extra}})
            assert code == 200, r

        def tokenize(text):
            code, r = s.post("/tokenize", {"prompt": text})
            assert code in (200, 400), r
        streams = [Stream(s, i) for i in range(STREAMS)]
        for st in streams:
            st.start()
        time.sleep(1)
        vocab = json.load(open(os.path.join(a.model, "config.json")))["vocab_size"]
        bias = {str(i): 0.5 for i in range(min(vocab, BIASES))}
        compare("logit_bias", streams, lambda: ask({"logit_bias": bias}), lambda: ask({}), a.rounds)
        words = ("some words and 12 more. " * (RUN_BYTES // 24 + 1))[:RUN_BYTES]
        compare("long run", streams, lambda: tokenize("a" * RUN_BYTES), lambda: tokenize(words), a.rounds)
        for st in streams:
            st.end = True
        s.idle(30)
        before = None
        for n in (50000, 100000, 200000, 400000, 800000):
            body = '{"input_ids":[5],"sampling_params":{"max_new_tokens":1},' + ",".join('"k%d":1' % i for i in range(n)) + "}"
            took = []
            for _ in range(3):
                t = time.perf_counter()
                code, r = s.post("/generate", body)
                took.append(time.perf_counter() - t)
                assert code == 200, r
            t = min(took)
            print(f"JSON        {n:7} keys, {len(body) / 1e6:5.1f} MB: {1e3 * t:7.1f} ms" + (f", x {t / before:.2f}" if before else ""), flush=True)
            before = t


if __name__ == "__main__":
    main()
