"""Seeded sequences of moves over the control routes, each checked against what the answers must be.

    python3 test/server/fuzz_control.py [sequences [seed [servers [first]]]]

A sequence is a few moves (MOVES: a table; a branch that adds routes adds rows) whose calls overlap: a call is sent
and its answer is read later.  At its end the pause is lifted, every call is answered, and nothing is left in use.
Two kinds of servers: on CHAIN models every token is one step of the table that its version names, so each token of
each span is checked; on the trained models the first span of an answer is the beginning of the known answer.
"""
import http.client
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time

sys.path.insert(0, os.path.dirname(__file__))
import checkpoint  # noqa: E402
from harness import EARLY, FINAL, Server, strict  # noqa: E402
from test_tensor import pack, read  # noqa: E402

SIZE = 288
CHAINS = {"A": {t: (t * 5 + 3) % SIZE for t in range(SIZE)}, "B": {t: (t * 7 + 11) % SIZE for t in range(SIZE)}}
HANG_S = float(os.environ.get("MOULT_HANG_S", 120 if os.environ.get("SLOW") else 30))  # more on a starved machine
PROMPTS = [[(s * 37 + i * 11) % 250 for i in range(n)] for s, n in ((1, 3), (2, 40), (2, 70), (3, 17))]


class Call:
    """One HTTP call: sent at once, read when asked for."""

    def __init__(self, f, method, path, body=None, check=None):
        self.f, self.check, self.path, self.done, self.body = f, check, path, False, body
        self.c = f.free.pop() if f.free else http.client.HTTPConnection("127.0.0.1", f.s.port, timeout=HANG_S)
        raw = isinstance(body, bytes)
        self.c.request(method, path, body if raw or body is None else json.dumps(body),
                       {"Content-Type": "application/octet-stream" if raw else "application/json"})
        f.calls += 1
        f.open.append(self)

    def read(self):
        if self.done:
            return self.status, self.data
        r = self.c.getresponse()
        self.status, self.data, self.done = r.status, r.read(), True
        self.f.open.remove(self)
        self.f.free.append(self.c)
        if self.status == 503 and b"memory is released" in self.data:  # it came while `lend` had it
            self.f.count("lent")
            return self.status, self.data
        assert self.status < 500, (self.path, self.body, self.status, self.data)
        if self.check:
            self.check(self.status, self.data)
        return self.status, self.data

    def leave(self):
        self.c.close()
        self.done = True
        self.f.open.remove(self)


class Fuzz:
    def __init__(self, server, models, rng):
        self.s, self.models, self.rng = server, models, rng
        self.free, self.open, self.log, self.seen = [], [], [], {}
        self.calls = self.label_n = 0
        self.paused = None  # as the calls that were answered left it
        self.slowest_health = 0

    def call(self, method, path, body=None, check=None, now=True):
        c = Call(self, method, path, body, check)
        return c.read() if now else c

    def count(self, what):
        self.seen[what] = self.seen.get(what, 0) + 1

    # ---- what must hold of an answer ----

    def ok(self, status, data):
        assert status == 200, (status, data)

    def answer(self, prompt, n):
        def check(status, data):
            assert status == 200, (status, data)
            text = data.decode("utf-8", "strict")
            if text.startswith("data: "):
                frames = [x[6:] for x in text.split("\n\n") if x]
                assert frames[-1] == "[DONE]", frames[-1:]
                text = frames[-2]
            r = strict(text)
            ids, m = r["output_ids"], r["meta_info"]
            spans, reason = m["weight_versions"], m["finish_reason"]["type"]
            self.count(reason)
            if len(spans) > 1:
                self.count("spanned")
            assert reason in ("length", "abort") and len(ids) == m["completion_tokens"] == sum(k for _, k in spans), r
            assert reason == "abort" or len(ids) == n, r
            assert m["prompt_tokens"] == len(prompt) and "cached_tokens" in m and m["weight_version"], r
            assert len(m["output_token_logprobs"]) == len(ids), r
            self.models.check(prompt, ids, spans)
        return check

    # ---- the end of a sequence ----

    def settle(self):
        self.call("POST", "/continue_generation", {}, self.ok)
        for c in list(self.open):
            c.read()
        for _ in range(2000):  # those that left are aborted a moment later
            load = strict(self.call("GET", "/v1/loads")[1])["loads"][0]
            if load["num_total_reqs"] == 0:
                break
            time.sleep(0.002)
        else:
            raise AssertionError(f"not idle: {load}")
        assert load["queues"] == {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0} and load["paused"] is None, load
        self.call("POST", "/flush_cache", None, self.ok)
        info = strict(self.call("GET", "/server_info")[1])
        assert info["kv_pages_free"] == info["kv_pages_total"], info
        self.paused = None


class Chains:
    """Any token follows from the one before by the table of its span."""

    def __init__(self, root):
        self.dirs = {k: checkpoint.chain(os.path.join(root, k), t, size=SIZE) for k, t in CHAINS.items()}
        self.first, self.most, self.tensors = "A", 150, {}

    def check(self, prompt, ids, spans):
        last, at = prompt[-1], 0
        for version, n in spans:
            name = version.split(":")[-1]
            fits = set(CHAINS) if name not in CHAINS else {name}
            for t in ids[at:at + n]:
                fits = {k for k in fits if CHAINS[k][last] == t}
                last = t
            assert n > 0 and fits, (prompt, ids, spans, at)
            at += n


class Trained:
    """The first span is the beginning of what its model answers."""
    dirs = {"A": EARLY, "B": FINAL}
    first, most = "A", 100

    def __init__(self):
        self.want, self.tensors = {}, {}
        for k, d in self.dirs.items():
            with Server(d) as s:
                self.want[k] = [s.generate(p, self.most, ignore_eos=True)["output_ids"] for p in PROMPTS]

    def check(self, prompt, ids, spans):
        i = PROMPTS.index(prompt)
        if not spans:
            return
        version, n = spans[0]
        name = version.split(":")[-1]
        assert any(ids[:n] == self.want[k][i][:n] for k in self.want if name not in self.want or k == name), \
            (prompt, ids, spans)


# ---- the moves: each sends one call (and reads its answer, if that comes at once) ----

def generate(f):
    p, n = f.rng.choice(PROMPTS), f.rng.choice((0, 1, 7, f.models.most // 4, f.models.most, f.models.most))
    body = {"input_ids": p, "stream": f.rng.random() < 0.4, "return_logprob": True, "priority": f.rng.randrange(2),
            "sampling_params": {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}}
    f.call("POST", "/generate", body, f.answer(p, n), now=False)


def complete(f):
    f.call("POST", "/v1/completions", {"prompt": f.rng.choice(PROMPTS), "max_tokens": 3, "temperature": 0}, f.ok, now=False)


def leave(f):
    mine = [c for c in f.open if c.path == "/generate"]
    if mine:
        f.rng.choice(mine).leave()


def pause(f):
    mode = f.rng.choice(("abort", "retract", "in_place"))
    f.call("POST", "/pause_generation", {"mode": mode}, f.ok)
    f.paused = mode


def go_on(f):
    f.call("POST", "/continue_generation", {}, f.ok)
    f.paused = None


def flush(f):
    timeout = f.rng.choice(("", "?timeout=0.01", "?timeout=0.2"))
    seen = f.paused

    def check(status, data):
        assert status in (200, 400), (status, data)
        f.count(f"flush {status}")
        if seen in ("abort", "retract") and b"another flush" not in data:
            assert status == 200, (seen, data)  # nothing holds KV, and nothing begins to
    f.call("POST", "/flush_cache" + timeout, None, check, now=seen is not None or f.rng.random() < 0.5)


def label(f, model):
    f.label_n += 1
    return f"{f.label_n}:{model}"


def busy(text):
    """Why an update may be refused: another one is open, or weights are lent."""
    return "another weight update" in text or "memory is released" in text


def update(f):
    model = f.rng.choice(sorted(f.models.dirs))
    body = {"model_path": f.models.dirs[model], "weight_version": label(f, model),
            "flush_cache": f.rng.random() < 0.5}
    for key, values in (("in_flight", ("drain", "retract", "continue", "abort")), ("drain_timeout", (0.005,)),
                        ("abort_all_requests", (False,))):
        if f.rng.random() < 0.6:
            body[key] = f.rng.choice(values)

    def check(status, data):
        r = strict(data)
        f.count(f"update {status}")
        assert r["success"] is (status == 200), (status, r)
        assert status == 200 or busy(r["message"]), r
        if status == 200:
            assert f"updated to {body['weight_version']}" in r["message"], r
    f.call("POST", "/update_weights_from_disk", body, check, now=f.rng.random() < 0.3)


def bad_update(f):
    def check(status, data):
        assert status == 400 and strict(data)["success"] is False, (status, data)
        f.count("bad update")
    f.call("POST", "/update_weights_from_disk", {"model_path": "/nowhere", "abort_all_requests": True, "weight_version": "x"},
           check, now=f.rng.random() < 0.5)


def tensors(f):
    """A whole model as tensors, in one call."""
    model = f.rng.choice(sorted(f.models.dirs))

    def check(status, data):
        r = strict(data)
        f.count(f"tensors {status}")
        assert r["success"] is (status == 200), (status, r)
        assert status == 200 or busy(r["message"]) or "given twice" in r["message"], r  # a session is open
    flight = f.rng.choice(("", "&in_flight=retract", "&in_flight=continue", "&in_flight=drain"))
    f.call("POST", f"/update_weights_from_tensor?weight_version={label(f, model)}{flight}", pack(halves(f, model, 1)[0]), check,
           now=f.rng.random() < 0.3)


def session(f):
    """In buckets; its end is called, or left to continue, or it is dropped."""
    model = f.rng.choice(sorted(f.models.dirs))
    for c in [c for c in f.open if c.path.startswith("/update_weights_from_tensor")]:
        c.read()  # it would be a bucket of this one
    status, data = f.call("POST", "/begin_weight_update", {})
    if status != 200:
        assert busy(data.decode()) or b"open already" in data, data
        return
    name = label(f, model)
    for part in halves(f, model, 2):
        f.call("POST", "/update_weights_from_tensor?weight_version=" + name, pack(part), f.ok)
    end = f.rng.choice(("end", "continue", "discard"))
    f.count("session " + end)
    if end == "end":
        f.call("POST", "/end_weight_update", {}, f.ok)
    elif end == "discard":
        f.call("POST", "/discard_staged_weights", {}, f.ok)
    elif f.rng.random() < 0.5:
        go_on(f)


def halves(f, model, n):
    have = f.models.tensors.setdefault(model, read(f.models.dirs[model]))
    names = sorted(have)
    return [{k: have[k] for k in names[i::n]} for i in range(n)]


def lend(f):
    """Memory away and back, if nothing has it."""
    status, data = f.call("POST", "/release_memory_occupation", {"tags": f.rng.choice((None, ["kv_cache"], ["weights"]))})
    f.count(f"release {status}")
    assert status == 200 or b"cannot be released" in data, (status, data)
    f.call("POST", "/resume_memory_occupation", {}, f.ok)


def relabel(f):
    body = {"new_version": label(f, "?")}
    if f.rng.random() < 0.2:
        body["abort_all_requests"] = True
    f.call("POST", "/update_weight_version", body, f.ok)


def abort(f):
    f.call("POST", "/abort_request", {"abort_all": True}, f.ok)


def look(f):
    t = time.time()
    f.call("GET", f.rng.choice(("/health", "/health_generate")), None, f.ok)
    f.slowest_health = max(f.slowest_health, time.time() - t)
    r = strict(f.call("GET", "/v1/loads")[1])["loads"][0]
    assert r["paused"] == f.paused, (r, f.paused)
    assert r["queues"]["paused"] == (r["num_total_reqs"] if f.paused else 0), r
    if f.paused in ("abort", "retract"):
        assert r["num_running_reqs"] == 0 and r["num_used_tokens"] == 0, r


def collect(f):
    """Read an answer that must be on its way: nothing pauses, so everything ends."""
    if f.paused is None and f.open:
        f.rng.choice(f.open).read()


def nap(f):
    time.sleep(f.rng.random() * 0.004)


# (how often, move)
MOVES = [(10, generate), (1, complete), (2, leave), (4, pause), (4, go_on), (3, flush), (4, update), (1, bad_update),
         (2, relabel), (1, abort), (2, look), (2, collect), (3, nap), (2, tensors), (2, session), (1, lend)]


def sequence(f, seed, index):
    f.rng = random.Random(f"{seed}/{index}")
    f.log = []
    moves = f.rng.choices([m for _, m in MOVES], [w for w, _ in MOVES], k=f.rng.randint(3, 9))
    try:
        for m in moves:
            f.log.append(m.__name__)
            m(f)
        f.log.append("settle")
        f.settle()
    except BaseException as e:
        print(f"sequence {index} of seed {seed}: {' '.join(f.log)}: {e!r}", flush=True)
        raise


def run(kind, seed, indices, result=None, told=500):
    """All of them against one server; gives the counts of what happened."""
    t0 = time.time()
    flags = ("--max-total-tokens", "512", "--max-running-requests", "4", "--chunked-prefill-size", "16", "--threads", "1",
             "--log-level", "warning", "--enable-memory-saver", "--enable-weights-cpu-backup")
    with tempfile.TemporaryDirectory() as root:
        models = Trained() if kind == "trained" else Chains(root)
        if kind == "retracting":
            flags += ("--retract-every", "7")
        with Server(models.dirs[models.first], *flags, "--weight-version", "0:" + models.first) as s:
            f = Fuzz(s, models, None)
            files = len(os.listdir(f"/proc/{s.proc.pid}/fd"))
            for k, i in enumerate(indices):
                if k and k % told == 0:
                    print(f"{kind}: {k} of {len(indices)} after {time.time() - t0:.0f} s", file=sys.stderr, flush=True)
                sequence(f, seed, i)
                if len(f.free) > 24:
                    f.free.pop().close()
            for c in f.free:
                c.close()
            f.seen.update(calls=f.calls, sequences=len(indices), slowest_health_ms=round(f.slowest_health * 1000))
            for _ in range(1000):
                left = len(os.listdir(f"/proc/{s.proc.pid}/fd")) - files
                if left <= 0:
                    break
                time.sleep(0.02)
            assert left <= 0, f"{left} descriptors are left"
    if result is not None:
        result.put(f.seen)
    return f.seen


def share(indices, seed, servers):
    """One sequence in 32 on the trained models, the rest on chains, of every second server with retractions in between;
    `servers` at a time."""
    parts = [("trained", [i for i in indices if i % 32 == 0])]
    rest = [i for i in indices if i % 32]
    chains = max(servers - 1, 1)
    parts += [("retracting" if k % 2 else "chains", rest[k::chains]) for k in range(chains)]
    result, total = multiprocessing.Queue(), {}
    jobs = [multiprocessing.Process(target=run, args=(kind, seed, part, result)) for kind, part in parts if part]
    for j in jobs:
        j.start()
    seen = []
    for j in jobs:
        j.join()
        assert j.exitcode == 0, "a part failed; its message is above"
        seen.append(result.get())
    for part in seen:
        for k, v in part.items():
            total[k] = max(total.get(k, 0), v) if k.startswith("slowest") else total.get(k, 0) + v
    return total


if __name__ == "__main__":
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    chosen = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    servers = int(sys.argv[3]) if len(sys.argv) > 3 else 3
    first = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    os.makedirs("build/log", exist_ok=True)
    t0 = time.time()
    print(json.dumps(share(range(first, first + n), chosen, servers), sort_keys=True))
    print(f"{n} sequences of seed {chosen} from {first} in {time.time() - t0:.0f} s: no hang, no crash, no lost request")
