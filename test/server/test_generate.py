"""/generate: ids, logprobs, seeds, stops, streams, aborts, clients that leave."""
import json
import os
import random
import socket
import struct
import threading
import time

from harness import EARLY, FINAL, SLOW, Server


def reference(name):
    return json.load(open(f"test/data/{name}.reference.json"))["references_float32"]


def test_reference_ids_and_logprobs():
    """Against transformers in float32: prompt ids by text, prompt logprobs, greedy ids of the confident model."""
    with Server(FINAL) as s:
        diffs, same = [], 0
        refs = reference("final")[::3 if SLOW else 1]
        for ref in refs:
            r = s.generate(ref["prompt"], len(ref["greedy_ids"]), logprob_start_len=0)
            lp = r["meta_info"]["input_token_logprobs"]
            assert [x[1] for x in lp] == ref["input_ids"], ref["prompt"][:60]
            assert lp[0][0] is None
            diffs += [abs(a[0] - b) for a, b in zip(lp[1:], ref["prompt_logprobs"])]
            same += r["output_ids"] == ref["greedy_ids"]
        diffs.sort()
        mean, p99 = sum(diffs) / len(diffs), diffs[int(len(diffs) * 0.99)]
        assert mean <= 4e-3 and p99 <= 0.04, (mean, p99)
        assert same >= len(refs) - 2, same  # bf16 arithmetic may flip a near tie of the odd prompts


def test_ready_and_info():
    with Server(FINAL) as s:
        if not SLOW:
            assert s.ready_s < 2, s.ready_s
        assert s.get("/model_info")[1]["model_path"] == FINAL
        assert s.get("/get_model_info")[1]["weight_version"] == "default"
        assert s.get("/server_info")[1]["status"] == "ready"
        assert s.get("/health_generate")[0] == 200
        assert s.request("HEAD", "/", raw=True)[0] == 200


def test_logprobs_have_one_meaning():
    """Top logprobs agree with the token's own; temperature 0 gives unscaled ones; lengths match."""
    with Server(EARLY) as s:
        r = s.generate([32] * 20, 8, top_logprobs_num=5, logprob_start_len=3, ignore_eos=True)
        m = r["meta_info"]
        assert len(m["output_token_logprobs"]) == m["completion_tokens"] == len(r["output_ids"]) == 8
        assert m["input_token_logprobs"][0][0] is None and len(m["input_token_logprobs"]) == 17
        for own, top in zip(m["output_token_logprobs"], m["output_top_logprobs"]):
            assert len(top) == 5 and top[0][0] == own[0] and top[0][1] == own[1]
            assert all(a[0] >= b[0] for a, b in zip(top, top[1:]))
        # the score of the greedy continuation, as a prompt, is what was reported when it was drawn
        ids = [32] * 20 + r["output_ids"]
        again = s.generate(ids, 0, logprob_start_len=19)["meta_info"]["input_token_logprobs"]
        assert [x[0] for x in again[1:]] == [x[0] for x in m["output_token_logprobs"]]


def test_seeds():
    """C45: unseeded samples differ, an echoed seed repeats, n samples differ, sample 0 is the n=1 run."""
    with Server(EARLY) as s:
        p = [2046, 375, 198]
        kw = dict(temperature=1.0, ignore_eos=True)
        runs = [s.generate(p, 24, **kw) for _ in range(8)]
        assert len({tuple(r["output_ids"]) for r in runs}) == 8
        seed = runs[0]["meta_info"]["sampling_seed"]
        again = s.generate(p, 24, sampling_seed=seed, **kw)
        assert again["output_ids"] == runs[0]["output_ids"]
        assert again["meta_info"]["output_token_logprobs"] == runs[0]["meta_info"]["output_token_logprobs"]
        eight = s.generate(p, 24, n=8, sampling_seed=42, **kw)
        assert len({tuple(r["output_ids"]) for r in eight}) == 8
        noise = [threading.Thread(target=s.generate, args=([7 + i] * 30, 40)) for i in range(20)]
        for t in noise:
            t.start()
        repeat = s.generate(p, 24, n=8, sampling_seed=42, **kw)
        for t in noise:
            t.join()
        assert [r["output_ids"] for r in repeat] == [r["output_ids"] for r in eight]
        one = s.generate(p, 24, sampling_seed=42, **kw)
        assert one["output_ids"] == eight[0]["output_ids"]
        cold = s.generate(p, 24, sampling_seed=42, **{**kw, "temperature": 0.3})
        assert cold["output_ids"] != one["output_ids"]  # the temperature counts
        # four prompts, four samples each: by prompt, then by sample, each as when it is asked for alone
        prompts = [p, [5], [6, 7], list(range(40))]
        sp = {"max_new_tokens": 12, "sampling_seed": 9, "n": 4, **kw}
        got = s.post("/generate", {"input_ids": prompts, "sampling_params": sp})[1]
        want = [r["output_ids"] for q in prompts for r in s.generate(q, 12, n=4, sampling_seed=9, **kw)]
        assert [r["output_ids"] for r in got] == want and len({tuple(x) for x in want}) == 16
        choices = s.post("/v1/completions", {"prompt": prompts, "max_tokens": 12, "seed": 9, "n": 4, "temperature": 1.0,
                                             "ignore_eos": True})[1]["choices"]
        assert [c["index"] for c in choices] == list(range(16))
        assert [c["text"] for c in choices] == [r["text"] for r in got]
        zero = [s.generate(p, 24, sampling_seed=0, **kw)["output_ids"] for _ in range(2)]
        assert zero[0] == zero[1]
        null = [s.generate(p, 24, sampling_seed=None, **kw)["output_ids"] for _ in range(2)]
        assert null[0] != null[1]
        last = s.generate(p, 4, sampling_seed=2 ** 63 - 1, **kw)
        assert last["meta_info"]["sampling_seed"] == 2 ** 63 - 1


def test_streams_equal_answers():
    """Cumulative frames end in the plain answer; stop strings never leak (C27, C43)."""
    with Server(FINAL) as s, Server(FINAL, "--incremental-streaming-output") as inc:
        text = "Question: A farm has 10 ducks and 4 dogs. How many animals are there?\nAnswer:"
        whole = s.generate(text, 60)["text"]
        for stop in (None, "Question", [whole[5:9]], [whole[7:12], "zzz"]):
            for trim in (False, True):
                sp = {"temperature": 0, "max_new_tokens": 60, "stop": stop, "no_stop_trim": trim}
                body = {"text": text, "sampling_params": sp}
                plain = s.post("/generate", body)[1]
                frames = s.stream("/generate", body)
                texts = [f["text"] for f in frames]
                assert texts[-1] == plain["text"]
                assert all(b.startswith(a) for a, b in zip(texts, texts[1:])), "text was withdrawn"
                assert "".join(f["text"] for f in inc.stream("/generate", body)) == plain["text"]
                if isinstance(stop, list):
                    first = min(whole.find(x) for x in stop if x in whole)
                    word = next(x for x in stop if whole.find(x) == first)
                    assert plain["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
                    if trim:  # not trimmed: the token that ends the stop string is kept whole
                        assert plain["text"].startswith(whole[:first] + word), plain
                    else:
                        assert plain["text"] == whole[:first], plain


def test_prefix_cache_and_batch_do_not_show():
    """Alone, in a crowd, after a prefix hit: the same bits."""
    with Server(EARLY) as s:
        p = [(i * 7) % 2000 for i in range(300)]
        cold = s.generate(p, 16, ignore_eos=True)
        warm = s.generate(p, 16, ignore_eos=True)
        assert cold["meta_info"]["cached_tokens"] == 0 and warm["meta_info"]["cached_tokens"] >= 256
        crowd = [None] * 32

        def ask(i):
            crowd[i] = s.generate(p if i % 2 else [i] * (i + 1), 16, ignore_eos=True)
        ts = [threading.Thread(target=ask, args=(i,)) for i in range(32)]
        for t in ts:
            t.start()
        for t in ts:
            t.join()
        for r in [warm] + crowd[1::2]:
            assert r["output_ids"] == cold["output_ids"]
            assert r["meta_info"]["output_token_logprobs"] == cold["meta_info"]["output_token_logprobs"]


def send_and_leave(s, body, how, after=0.15):
    c = socket.create_connection(("127.0.0.1", s.port))
    data = json.dumps(body).encode()
    c.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
              + str(len(data)).encode() + b"\r\n\r\n" + data)
    time.sleep(after)
    if how == "rst":
        c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    c.close()


def test_client_leaves():
    """C49: a client that leaves frees its place at once, streaming or not, running or queued."""
    with Server(EARLY, "--max-running-requests", "4") as s:
        sp = {"temperature": 0, "max_new_tokens": 3900, "ignore_eos": True}
        for stream in (False, True):
            for how in ("fin", "rst"):
                for _ in range(6):  # 4 run, 2 wait
                    threading.Thread(target=send_and_leave, args=(
                        s, {"text": "x", "rid": None, "sampling_params": sp, "stream": stream}, how)).start()
                time.sleep(0.3)
                s.idle(60)
        assert 0 < s.generated() < 24 * 3900 // 2, s.generated()  # most of what was asked for was not drawn
        status, text = s.post("/flush_cache", {})
        assert status == 200, text


def threads_and_files(s):
    return len(os.listdir(f"/proc/{s.proc.pid}/task")), len(os.listdir(f"/proc/{s.proc.pid}/fd"))


def quiet(s):
    """The counts once closed connections are gone: the least within half a second without a change."""
    end, last, since = time.time() + 10, threads_and_files(s), time.time()
    while time.time() < end and time.time() - since < 0.5:
        time.sleep(0.05)
        now = threads_and_files(s)
        if now != last:
            last, since = now, time.time()
    return last


def test_client_leaves_anywhere():
    """C49: within a chunked prefill, by half closing (taken as leaving on every route), and many times at random."""
    with Server(EARLY, "--max-running-requests", "4", "--chunked-prefill-size", "16") as s:
        s.settle()
        s.generate([5], 2)
        before = quiet(s)
        sp = {"temperature": 0, "max_new_tokens": 3900, "ignore_eos": True}
        for stream in (False, True):
            send_and_leave(s, {"input_ids": [5] * 4000, "rid": "again", "sampling_params": {"max_new_tokens": 1},
                               "stream": stream}, "rst", 0.1)
            end = time.time() + 20
            while True:  # the id is free again, whether the request had begun or not
                status, r = s.post("/generate", {"input_ids": [5], "rid": "again", "sampling_params": {"max_new_tokens": 2}})
                if status == 200 or time.time() > end:
                    break
            assert status == 200 and r["meta_info"]["id"] == "again", r
            s.idle()
        for path, field in (("/generate", "text"), ("/v1/completions", "prompt"), ("/v1/chat/completions", "messages")):
            body = {"max_tokens": 3900, "ignore_eos": True, "sampling_params": sp} if path != "/generate" else {"sampling_params": sp}
            body[field] = [{"role": "user", "content": "x"}] if field == "messages" else "x"
            data = json.dumps(body).encode()
            c = socket.create_connection(("127.0.0.1", s.port))
            c.sendall(b"POST " + path.encode() + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
                      + str(len(data)).encode() + b"\r\n\r\n" + data)
            time.sleep(0.1)
            c.shutdown(socket.SHUT_WR)
            s.idle(20)
            c.close()
        rng, ts = random.Random(49), []
        for i in range(60 if SLOW else 1000):
            n = rng.choice((1, 3, 40, 300))
            body = {"input_ids": [rng.randrange(2000)] * n, "stream": rng.random() < 0.5, "rid": f"r{i}",
                    "sampling_params": {"max_new_tokens": rng.choice((1, 20, 3000)), "ignore_eos": True, "n": rng.choice((1, 1, 2))}}
            t = threading.Thread(target=send_and_leave, args=(s, body, rng.choice(("fin", "rst")), rng.random() * 0.05))
            t.start()
            ts.append(t)
            if len(ts) == 20:
                for t in ts:
                    t.join()
                ts = []
        for t in ts:
            t.join()
        s.idle(20)
        assert s.post("/flush_cache", {})[0] == 200
        info = s.get("/server_info")[1]
        assert info["kv_pages_free"] == info["kv_pages_total"] and info["kv_pages_cached"] == 0, info
        end = time.time() + 20
        while quiet(s) != before and time.time() < end:
            pass
        assert threads_and_files(s) == before, (before, threads_and_files(s))
        assert s.generate([5], 2)["output_ids"]


def test_abort_keeps_a_prefix():
    long = 600 if SLOW else 3000
    with Server(EARLY, "--max-running-requests", "2") as s:
        full = s.generate([5, 6, 7], long, ignore_eos=True)
        out = {}

        def ask(rid):
            out[rid] = s.generate([5, 6, 7], long, ignore_eos=True, rid=rid)
        ts = [threading.Thread(target=ask, args=(f"job-{i}",)) for i in range(4)]
        for t in ts:
            t.start()
        time.sleep(0.3)
        assert s.post("/abort_request", {"rid": "job-"})[0] == 200
        for t in ts:
            t.join()
        for r in out.values():
            m = r["meta_info"]
            assert m["finish_reason"]["type"] == "abort", m["finish_reason"]
            n = m["completion_tokens"]
            assert n == len(r["output_ids"]) == len(m["output_token_logprobs"]) < long
            assert r["output_ids"] == full["output_ids"][:n]
            assert "prompt_tokens" in m and "cached_tokens" in m and "weight_version" in m
