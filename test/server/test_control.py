"""The control routes: pause, continue, flush, abort, labels and updates, alone and on top of each other (docs/control.md)."""
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time

import fuzz_control
from harness import EARLY, FINAL, SLOW, Server, signature
from test_load import SLOW_READ

UPDATE, STAGE = "/update_weights_from_disk", "/stage_weights_from_disk"
LONG = 3000 if SLOW else 3800  # tokens of a request that is still running when something happens to it
SOME = 600 if SLOW else 1000  # the same of one that is to end by itself
MODES = ("abort", "retract", "in_place")


class Asked:
    """A call in a thread of its own."""

    def __init__(self, s, path, body):
        self.got = None
        self.t = threading.Thread(target=lambda: setattr(self, "got", s.post(path, body)))
        self.t.start()

    def answer(self, limit=120):
        self.t.join(limit)
        assert self.got is not None, "no answer"
        return self.got

    def result(self):
        status, r = self.answer()
        assert status == 200, (status, r)
        return r

    def waits(self):
        return self.t.is_alive()


def ask(s, prompt=(5, 6, 7), n=LONG, **k):
    body = {"input_ids": list(prompt), "return_logprob": True, "sampling_params": {"temperature": 0, "max_new_tokens": n, "ignore_eos": True}}
    return Asked(s, "/generate", dict(body, **k))


def load_when(s, limit=20, **want):
    """/v1/loads once its numbers are these."""
    t = time.time()
    while True:
        load = s.loads()
        flat = dict(load, **{"q_" + k: v for k, v in load["queues"].items()})
        if all(flat[k] == v for k, v in want.items()):
            return load
        assert time.time() - t < limit, (want, load)
        time.sleep(0.003)


def pause(s, mode):
    assert s.post("/pause_generation", {"mode": mode}) == (200, {"message": "Generation paused successfully.", "status": "ok"})


def go_on(s):
    assert s.post("/continue_generation", {}) == (200, {"message": "Generation continued successfully.", "status": "ok"})


def meta(r):
    return r["meta_info"]


def spans(r):
    v = meta(r)["weight_versions"]
    assert sum(n for _, n in v) == len(r["output_ids"]), r
    return [k for k, _ in v]


def health_is_fast(s):
    for path in ("/health", "/health_generate"):
        took = []
        for _ in range(5):
            t = time.time()
            assert s.get(path)[0] == 200
            took.append(time.time() - t)
        assert SLOW or min(took) < 0.1, took  # the least: the machine may be busy with other things


def test_pause_routes():
    """New calls wait on every route, aborts find them, nothing runs meanwhile, and the results are as ever."""
    with Server(EARLY) as s:
        want = s.generate([5, 6, 7], 400, ignore_eos=True)
        for body in ({"mode": "wait"}, {"mode": 5}, {"mode": ""}):
            status, r = s.post("/pause_generation", body)
            assert status == 400 and "in_place" in r["message"] or "string" in r["message"], r
        assert s.post("/continue_generation", {"torch_empty_cache": 5})[0] == 400
        go_on(s)  # without a pause: nothing
        for mode in MODES:
            running = ask(s, rid="long")
            load_when(s, num_running_reqs=1)
            pause(s, mode)
            load = s.loads()
            kept, held = int(mode == "in_place"), int(mode != "abort")
            assert load["paused"] == mode and load["num_running_reqs"] == kept, load
            assert load["queues"] == {"waiting": held - kept, "grammar": 0, "paused": held, "retracted": held - kept}, load
            assert (load["num_used_tokens"] > 0) == (mode == "in_place"), load
            held = [ask(s, n=400), ask(s, n=400, stream=True), ask(s, n=5, rid="gone"),
                    Asked(s, "/v1/completions", {"prompt": [5], "max_tokens": 3, "temperature": 0}),
                    Asked(s, "/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3})]
            load_when(s, q_paused=len(held) + (mode != "abort"))
            health_is_fast(s)
            assert s.post("/abort_request", {"rid": "gone"})[0] == 200
            r = held.pop(2).result()
            m = meta(r)
            assert m["finish_reason"]["type"] == "abort" and m["output_token_logprobs"] == [] and r["output_ids"] == [], r
            assert m["weight_version"] == "default" and m["prompt_tokens"] == 3 and m["cached_tokens"] == 0, r
            assert m["weight_versions"] == [] and m["completion_tokens"] == 0, r
            assert all(h.waits() for h in held)
            if mode == "in_place":  # the one that has run, with what it drew; retracted ones, after they went on
                assert s.post("/abort_request", {"rid": "long"})[0] == 200
                m = meta(running.result())
                assert m["finish_reason"]["type"] == "abort" and len(m["output_token_logprobs"]) == m["completion_tokens"] > 0
            go_on(s)
            for h in held:
                status, r = h.answer()
                assert status == 200, (status, r)
            assert held[0].got[1]["output_ids"] == want["output_ids"]
            assert meta(held[0].got[1])["output_token_logprobs"] == meta(want)["output_token_logprobs"]
            s.post("/abort_request", {"rid": "long"})
            r = running.result()
            n = min(len(r["output_ids"]), 400)
            assert meta(r)["output_token_logprobs"][:n] == meta(want)["output_token_logprobs"][:n]
            assert meta(r)["finish_reason"]["type"] == "abort"
            s.idle()


def test_flush_route():
    with Server(EARLY) as s:
        for bad in ("x", "-1", "nan", "1s", ""):
            assert s.get("/flush_cache?timeout=" + bad)[0] == 400, bad
        assert s.get("/flush_cache?timeout=5")[0] == 200
        r = ask(s)
        load_when(s, num_running_reqs=1)
        status, text = s.get("/flush_cache")
        assert status == 400 and "running" in text
        assert s.post("/flush_cache?timeout=0.05", None)[0] == 400
        pause(s, "in_place")
        status, text = s.get("/flush_cache?timeout=0.05")
        assert status == 400 and "in place" in text, text
        t = Asked(s, "/flush_cache?timeout=60", {})
        time.sleep(0.1)
        assert t.waits()
        status, text = s.get("/flush_cache")
        assert status == 400 and "another flush" in text, text
        pause(s, "retract")
        assert t.answer()[0] == 200
        assert s.get("/flush_cache")[0] == 200
        info = s.get("/server_info")[1]
        assert info["kv_pages_free"] == info["kv_pages_total"]
        assert s.post("/abort_request", {"abort_all": True})[0] == 200
        m = meta(r.result())  # while paused
        assert m["finish_reason"]["type"] == "abort" and m["num_retractions"] == 1 and m["completion_tokens"] > 0
        go_on(s)


def test_in_place_update_leaves_no_pages():
    """C09, second half: what kept its KV over an update leaves nothing that later requests could use."""
    p = [(i * 11) % 2000 for i in range(512)]
    n = 150 if SLOW else 500
    with Server(FINAL) as fresh, Server(EARLY) as s:
        for flush in (False, True):
            assert s.post(UPDATE, {"model_path": EARLY})[0] == 200
            r = ask(s, p, n)
            load_when(s, num_running_reqs=1)
            while s.loads()["num_used_tokens"] <= 528:
                time.sleep(0.002)
            pause(s, "in_place")
            status, u = s.post(UPDATE, {"model_path": FINAL, "flush_cache": flush, "weight_version": "2"})
            assert status == 200 and u["num_paused_requests"] == 1, u
            assert s.loads()["num_running_reqs"] == 1
            go_on(s)
            r = r.result()
            assert len(spans(r)) == 2 and spans(r)[1] == "2", meta(r)
            q = p + r["output_ids"][:100]
            got, want = s.generate(q, 8, ignore_eos=True), fresh.generate(q, 8, ignore_eos=True)
            assert meta(got)["cached_tokens"] == 0, meta(got)
            assert got["output_ids"] == want["output_ids"]
            assert meta(got)["output_token_logprobs"] == meta(want)["output_token_logprobs"]


def test_labels_touch_no_request():
    """C15: pause, update, label, continue: 16 streams live through it, and say under what each token was drawn."""
    with Server(EARLY) as s:
        body = {"sampling_params": {"temperature": 0, "max_new_tokens": LONG // 12, "ignore_eos": True}}
        got = [None] * 16

        def stream(i):
            got[i] = s.stream("/generate", dict(body, input_ids=[5, i]))
        ts = [threading.Thread(target=stream, args=(i,)) for i in range(16)]
        for t in ts:
            t.start()
        load_when(s, num_running_reqs=16)
        pause(s, "retract")
        assert s.post(UPDATE, {"model_path": "/nowhere", "weight_version": "6"})[0] == 400
        assert s.get("/get_weight_version")[1] == {"weight_version": "default"}
        status, r = s.post(UPDATE, {"model_path": FINAL, "weight_version": "7"})
        assert status == 200 and r["num_paused_requests"] == 16, r
        status, r = s.post("/update_weight_version", {"new_version": "8", "abort_all_requests": False})
        assert status == 200 and r["success"] is True and r["new_version"] == "8", r
        assert s.get("/get_weight_version")[1] == {"weight_version": "8"} == s.get("/weight_version")[1]
        assert s.get("/model_info")[1]["weight_version"] == "8"
        go_on(s)
        for t in ts:
            t.join()
        for frames in got:
            last = frames[-1]
            assert meta(last)["finish_reason"]["type"] == "length" and meta(last)["weight_version"] == "8"
            assert spans(last)[-1] == "8" and "7" not in spans(last) and len(spans(last)) <= 2, meta(last)
            assert meta(last)["num_retractions"] == 1
            for f in frames:
                spans(f)
        assert any(spans(frames[-1]) == ["default", "8"] for frames in got)
        # in the middle of an answer, by default and by word: a new label and nothing else; with abort_all: the end
        want = s.generate([9], SOME // 2, ignore_eos=True)
        for body, ends in (({"new_version": "9"}, False), ({"new_version": "10", "abort_all_requests": True}, True)):
            r = ask(s, [9], SOME // 2)
            load_when(s, num_running_reqs=1)
            assert s.post("/update_weight_version", body)[0] == 200
            r = r.result()
            assert (meta(r)["finish_reason"]["type"] == "abort") == ends, meta(r)
            if not ends:
                assert meta(r)["output_token_logprobs"] == meta(want)["output_token_logprobs"] and spans(r) == ["8", "9"]
        for bad in ({}, {"new_version": 5}, {"new_version": "x" * 128}, {"new_version": "1", "abort_all_requests": "no"}):
            assert s.post("/update_weight_version", bad)[0] == 400
        status, r = s.post("/v1/completions", {"prompt": [5], "max_tokens": 3})
        assert r["metadata"]["weight_version"] == "10" and r["metadata"]["weight_versions"] == [["10", r["usage"]["completion_tokens"]]], r
        for v, status in (("11", 200), ("9", 400), ("x", 400), (None, 400), ("11", 200)):
            got = s.post(UPDATE, {"model_path": FINAL, "weight_version": v, "refuse_older_version": True})
            assert got[0] == status and (status == 200 or "weight_version" in got[1]["message"]), (v, got)


def test_flush_and_update_with_requests():
    """C17: 64 running and 64 queued; (a) flush, (b) update, (c) the same with abort_all_requests, (d) after a pause."""
    n = 8 if SLOW else 64
    with Server(EARLY, "--max-running-requests", str(n)) as s:
        for what in "abcd":
            assert s.post(UPDATE, {"model_path": EARLY, "weight_version": "old"})[0] == 200
            most = LONG if what == "c" else 20 if SLOW else 50  # those of c are there when it comes
            rs = [ask(s, [5, i], most) for i in range(2 * n)]
            load_when(s, num_running_reqs=n)
            if what == "a":
                status, text = s.get("/flush_cache")
                assert status == 400 and "running" in text
            if what == "d":
                pause(s, "retract")
                assert s.get("/flush_cache")[0] == 200
            if what != "a":
                body = {"model_path": FINAL, "flush_cache": True, "weight_version": "new"}
                status, r = s.post(UPDATE, dict(body, abort_all_requests=True) if what == "c" else body)
                assert status == 200, r
            if what == "d":
                go_on(s)
            rs = [r.result() for r in rs]
            ends = [meta(r)["finish_reason"]["type"] for r in rs]
            assert ends.count("abort") == 0 or what == "c", ends
            if what == "c":  # what had not ended before
                assert ends.count("abort") > n and set(ends) <= {"abort", "length"}, ends
            if what == "b":  # each wholly under one
                assert all(len(spans(r)) == 1 for r in rs) and {"old", "new"} >= {spans(r)[0] for r in rs}
            if what == "d":
                assert all(spans(r)[-1] == "new" for r in rs if meta(r)["num_retractions"])
                assert any(meta(r)["num_retractions"] for r in rs)
            s.idle()


def test_in_flight():
    """By field, by default of the server; a drain that lasts too long retracts; bad values are named."""
    with Server(EARLY, "--update-in-flight", "retract") as s:
        for bad, says in (({"in_flight": "wait"}, "in_flight"), ({"in_flight": 5}, "in_flight"),
                          ({"drain_timeout": -1}, "drain_timeout"), ({"drain_timeout": "1"}, "drain_timeout"),
                          ({"in_flight": "drain", "abort_all_requests": True}, "contradicts"),
                          ({"load_format": "pt"}, "load_format"), ({"load_format": 5}, "load_format"),
                          ({"refuse_older_version": 1}, "refuse_older_version"), ({"weight_version": "v" * 128}, "weight_version")):
            status, r = s.post(UPDATE, dict(bad, model_path=FINAL))
            assert status == 400 and says in r["message"], (bad, r)
        rows = (({}, "length", 1), ({"in_flight": "continue"}, "length", 0), ({"in_flight": "drain"}, "length", 0),
                ({"in_flight": "drain", "drain_timeout": 0.01}, "length", 1), ({"in_flight": "abort"}, "abort", 0),
                ({"abort_all_requests": True}, "abort", 0))
        for i, (fields, end, retracted) in enumerate(rows):
            assert s.post(STAGE, {"model_path": (FINAL, EARLY)[i % 2]})[0] == 200  # the update is then only the commit
            r = ask(s, n=SOME)
            load_when(s, num_running_reqs=1)
            status, u = s.post(UPDATE, dict(fields, model_path=(FINAL, EARLY)[i % 2], weight_version=str(i)))
            assert status == 200, u
            r = r.result()
            assert meta(r)["finish_reason"]["type"] == end and meta(r)["num_retractions"] == retracted, (fields, meta(r))
            before = str(i - 1) if i else "default"
            lived = end == "length" and fields.get("in_flight") != "drain" or retracted
            assert spans(r) == ([before, str(i)] if lived else [before]), (fields, meta(r)["weight_versions"])
    with Server(EARLY, "--update-drain-timeout", "0.05") as s:
        assert s.post(STAGE, {"model_path": FINAL})[0] == 200
        r = ask(s, n=SOME)
        load_when(s, num_running_reqs=1)
        status, u = s.post(UPDATE, {"model_path": FINAL})
        assert status == 200 and u["drain_s"] >= 0.05, u
        assert meta(r.result())["num_retractions"] == 1


def test_ready_after_update():
    s = Server(EARLY, "--ready-after-update", wait=False)
    t = time.time()
    while True:
        assert time.time() - t < 120 and s.proc.poll() is None, s.text()
        try:
            if s.get("/health")[1] == {"status": "waiting for the first update"}:
                break
        except OSError:
            pass
        time.sleep(0.02)
    with s:
        for path in ("/health", "/health_generate"):
            assert s.get(path) == (503, {"status": "waiting for the first update"})
        for path, body in (("/generate", {"input_ids": [5]}), ("/v1/completions", {"prompt": [5]}),
                           ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})):
            status, r = s.post(path, body)
            assert status == 503 and "waiting for the first weight update" in r["message"], r
        assert s.get("/model_info")[0] == s.get("/flush_cache")[0] == s.get("/v1/loads")[0] == 200
        assert s.post(UPDATE, {"model_path": "/nowhere"})[0] == 400
        assert s.get("/health")[0] == 503  # a refused one is none
        pause(s, "retract")
        assert s.post(UPDATE, {"model_path": FINAL, "weight_version": "1"})[0] == 200
        go_on(s)
        assert s.get("/health")[0] == s.get("/health_generate")[0] == 200
        assert len(s.generate([5], 4, ignore_eos=True)["output_ids"]) == 4


def test_sigterm_while_paused():
    """What a pause holds is aborted and answered, at once."""
    for mode in MODES:
        with Server(EARLY, "--drain-timeout", "60") as s:
            rs = [ask(s)]
            load_when(s, num_running_reqs=1)
            pause(s, mode)
            rs.append(ask(s, [8], 5))
            load_when(s, q_paused=2 - (mode == "abort"))
            s.proc.send_signal(signal.SIGTERM)
            assert s.proc.wait(60 if SLOW else 10) == 0
            assert [meta(r.result())["finish_reason"]["type"] for r in rs] == ["abort", "abort"]


# ---- the table of docs/control.md: what each call does in each state ----

STATES = ("running", "draining", "abort", "retract", "in_place")
CALLS = ("generate", "abort", "flush", "pause", "continue", "update", "update_weight_version")
# held: the call waits; ends: the requests in flight are aborted; lives: they are not
OUTCOME = {
    ("running", "generate"): "200", ("draining", "generate"): "held", "generate": "held",
    "abort": "200 ends",
    ("running", "flush"): "400", ("draining", "flush"): "400", ("in_place", "flush"): "400", "flush": "200",
    "pause": "200 lives", "continue": "200",
    ("running", "update"): "held", ("draining", "update"): "400", "update": "200 lives",
    "update_weight_version": "200 lives",
}


def enter(s, state):
    """A long request in the state; with the update that drains, if that is it."""
    r, update = ask(s), None
    load_when(s, num_running_reqs=1)
    if state == "draining":
        update = Asked(s, UPDATE, {"model_path": EARLY})
        probe = ask(s, [9], 1)
        while not (probe.waits() and s.loads()["num_waiting_reqs"]):  # held back: the update has come to its drain
            if not probe.waits():
                probe = ask(s, [9], 1)
            assert r.waits(), "too short"
            time.sleep(0.002)
        return r, update, probe
    if state != "running":
        pause(s, state)
    return r, update, None


def test_every_combination():
    bodies = {"generate": ("/generate", {"input_ids": [4], "sampling_params": {"max_new_tokens": 1}}),
              "abort": ("/abort_request", {"abort_all": True}), "flush": ("/flush_cache", {}),
              "pause": ("/pause_generation", {"mode": "retract"}), "continue": ("/continue_generation", {}),
              "update": (UPDATE, {"model_path": EARLY, "weight_version": "u"}),
              "update_weight_version": ("/update_weight_version", {"new_version": "w"})}
    with Server(EARLY) as s:
        for state in STATES:
            for call in CALLS:
                want = OUTCOME.get((state, call)) or OUTCOME[call]
                r, update, probe = enter(s, state)
                c = Asked(s, *bodies[call])
                c.t.join(0.1 if want == "held" else 60)
                where = (state, call, want, c.got)
                if want == "held":
                    assert c.waits(), where
                else:
                    assert c.got and c.got[0] == int(want[:3]), where
                if "ends" in want:
                    assert meta(r.result())["finish_reason"]["type"] == "abort", where
                if "lives" in want and state != "abort":
                    assert r.waits(), where
                if call == "pause" and update:  # ends the drain
                    assert update.answer()[0] == 200 and r.waits(), where
                health_is_fast(s)
                s.post("/abort_request", {"abort_all": True})
                go_on(s)
                for x in (r, c, update, probe):
                    if x:
                        assert x.answer()[0] in (200, 400), where
                assert meta(r.got[1])["finish_reason"]["type"] == "abort", where
                s.idle()
                assert s.get("/flush_cache")[0] == 200


def test_while_staging():
    """Files are read slowly: everything is answered meanwhile as without an update, and what is paused commits."""
    if SLOW:
        print("skip test_while_staging: a preloaded library and a sanitizer do not go together")
        return
    with tempfile.TemporaryDirectory() as d:
        lib, switch = os.path.join(d, "slow.so"), os.path.join(d, "slow")
        source = SLOW_READ.replace("SWITCH", json.dumps(switch)).replace("usleep(1000000)", "while (access(SWITCH, F_OK) == 0) usleep(1000)")
        source = source.replace("SWITCH", json.dumps(switch))
        try:
            subprocess.run(["cc", "-shared", "-fPIC", "-o", lib, "-x", "c", "-", "-ldl"], input=source, text=True, check=True)
        except OSError:
            print("skip test_while_staging: no C compiler")
            return
        other = os.path.join(d, "m")
        shutil.copytree(FINAL, other)
        os.environ["LD_PRELOAD"] = lib
        try:
            s = Server(EARLY)
        finally:
            del os.environ["LD_PRELOAD"]
        with Server(FINAL) as fresh:
            want = signature(fresh)
        with s:
            before = signature(s)
            for mode in (None,) + MODES:
                open(switch, "w").close()
                assert s.post("/update_weight_version", {"new_version": "a"})[0] == 200
                update = Asked(s, UPDATE, {"model_path": other, "weight_version": "b"})
                time.sleep(0.2)
                assert signature(s) == before and update.waits()
                health_is_fast(s)
                assert s.get("/flush_cache")[0] == 200
                status, r = s.post(UPDATE, {"model_path": EARLY})
                assert status == 400 and "another weight update" in r["message"], r
                r = ask(s, n=300) if mode else None
                if mode:
                    load_when(s, num_running_reqs=1)
                    pause(s, mode)
                assert s.post("/update_weight_version", {"new_version": "c"})[0] == 200
                assert update.waits()
                os.remove(switch)
                assert update.answer()[0] == 200
                assert s.get("/get_weight_version")[1]["weight_version"] == "b"
                go_on(s)
                if mode:
                    assert meta(r.result())["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
                assert signature(s) == want
                assert s.post(UPDATE, {"model_path": EARLY})[0] == 200


def test_random_sequences():
    """Sequences of moves at random; MOULT_CONTROL_SEQUENCES of them (bench/results/control-fuzz.txt: what was run by hand)."""
    n = int(os.environ.get("MOULT_CONTROL_SEQUENCES", 60 if SLOW else 1000))
    seen = fuzz_control.share(range(n), 11, 3)
    print(json.dumps(seen, sort_keys=True))
    assert seen["sequences"] == n and all(seen.get(k, 0) > 0 for k in ("abort", "length", "update 200", "bad update", "flush 200")), seen
    assert SLOW or seen["spanned"] > 0, seen
