"""Bad and odd input: an answer that names the fault, nothing lost, neighbours undisturbed."""
import json
import os
import re
import resource
import shutil
import struct
import tempfile
import threading
import time

from harness import EARLY, FINAL, SLOW, Server, signature

LONG = 200 if SLOW else 800  # tokens of neighbours

BAD_SAMPLING = [  # C35, C37, C45, C47
    '{"temperature": -1}', '{"temperature": "nan"}', '{"temperature": NaN}', '{"temperature": Infinity}',
    '{"temperature": -Infinity}', '{"temperature": 1e999}', '{"top_p": 0}', '{"top_p": 1.5}', '{"top_k": 0}',
    '{"top_k": -2}', '{"min_p": 2}', '{"frequency_penalty": 3}', '{"repetition_penalty": 0}',
    '{"max_new_tokens": -1}', '{"max_new_tokens": 1.5}', '{"min_new_tokens": 9, "max_new_tokens": 8}',
    '{"n": 0}', '{"stop": [""]}', '{"stop": 5}', '{"stop_token_ids": ["a"]}', '{"sampling_seed": -1}',
    '{"sampling_seed": 9223372036854775808}', '{"logit_bias": {"2048": 1}}', '{"logit_bias": {"-1": 1}}',
    '{"logit_bias": {"5.5": 1}}', '{"logit_bias": {"abc": 1}}', '{"logit_bias": {"0x10": 1}}',
    '{"logit_bias": {"5": null}}', '{"logit_bias": {"2147483648": 1}}', '{"logit_bias": {"191222": 1}}',
    '{"logit_bias": {"5": NaN}}', '{"logit_bias": {"5": "1"}}', '{"logit_bias": {"": 1}}', '{"logit_bias": {" 5": 1}}',
    '{"logit_bias": {"+5": 1}}', '{"logit_bias": {"5": 1e31}}', '{"logit_bias": [5]}', '{"temprature": 1}',
    '{"regex": "a+)"}', '{"json_schema": "{\\"not\\": {}}"}', '{"ebnf": "x"}',
]
BAD_INPUT = [  # C39, C53
    '{"input_ids": [-1]}', '{"input_ids": [2048]}', '{"input_ids": [200000]}', '{"input_ids": [1.5]}',
    '{"input_ids": ["1"]}', '{"input_ids": [null]}', '{"input_ids": [9223372036854775808]}',
    '{"input_ids": [[1], [2048]]}', '{"input_ids": []}', '{"input_ids": [[]]}', '{}', '{"text": 5}', '[]', '"x"', '',
    '{"text": ""}', '{"text": ["a", ""]}', '{"text": []}', '{"text": "a", "stream": "yes"}', '{"text": "a"',
    '{"text": "a", "rid": 5}', '{"text": ["a", "b"], "rid": ["x", "x"]}', '{"text": "a", "lora_path": "x"}',
    '{"text": "\\ud800"}', '{"text": "a", "logprob_start_len": 9, "return_logprob": true}',
    '{"text": "a", "top_logprobs_num": -1, "return_logprob": true}',
]


def test_bad_requests_are_named():
    with Server(EARLY) as s:
        before = signature(s)
        long = s.generate([5, 6, 7], LONG, ignore_eos=True)
        beside, ts = [], [threading.Thread(target=lambda: beside.append(s.generate([5, 6, 7], LONG, ignore_eos=True)))
                          for _ in range(8)]
        for t in ts:
            t.start()
        bodies = ['{"text": "a", "sampling_params": %s}' % b for b in BAD_SAMPLING] + BAD_INPUT
        for body in bodies:
            for streaming in (False, True):
                if streaming and (body in ("{}", "") or not body.endswith("}") or '"stream"' in body):
                    continue
                b = body[:-1] + ', "stream": true}' if streaming else body
                status, r = s.post("/generate", b)
                assert status == 400, (status, b, r)
                message = r["error"]["message"]
                assert r["message"] == message and r["object"] == "error" and r["code"] == 400, r
                assert len(message) > 5, (b, r)
        r = s.post("/generate", '{"text": "a", "sampling_params": {"temprature": 1}}')[1]
        assert "temprature" in r["message"] and "temperature" in r["message"], r
        r = s.post("/generate", '{"input_ids": [5, 2048]}')[1]
        assert "2048" in r["message"] and "1" in r["message"], r
        for bad in (b for b in BAD_INPUT if b.startswith('{"input_ids": [') and "[]" not in b and '"1"' not in b):
            ids = bad[len('{"input_ids": '):-1]  # ["1"] is a list of texts there
            for path, body in (("/v1/completions", '{"prompt": %s}' % ids),
                               ("/v1/chat/completions", '{"input_ids": %s}' % ids)):  # C39
                status, r = s.post(path, body)
                assert status == 400 and len(r["message"]) > 5, (path, body, status, r)
        many = {str(i): 1 for i in range(300000 if SLOW else 1000000)}
        status, r = s.post("/generate", {"input_ids": [5], "sampling_params": {"logit_bias": many}})
        assert status == 400 and "logit_bias" in r["message"] and "2048" in r["message"], (status, r)
        for t in ts:
            t.join()
        assert len(beside) == 8
        for r in beside:  # the same bits as in a run of its own
            assert r["output_ids"] == long["output_ids"]
            assert r["meta_info"]["output_token_logprobs"] == long["meta_info"]["output_token_logprobs"]
        assert signature(s) == before
        s.idle()


def test_odd_but_legal():
    with Server(EARLY) as s:
        for t in (0, 1e-8, 1e-5, 1e-4, 1, 1e30):
            r = s.generate([5], 4, temperature=t)
            assert all(abs(x[0]) < 1e38 for x in r["meta_info"]["output_token_logprobs"])
        greedy = s.generate([32] * 9, 8, ignore_eos=True)["output_ids"]
        assert s.generate([32] * 9, 8, temperature=1e-8, ignore_eos=True)["output_ids"] == greedy
        for value in (1e9, -1e9, 1e30):  # the last id there is
            r = s.generate([5], 2, logit_bias={"2047": value}, ignore_eos=True, top_logprobs_num=5)
            assert (r["output_ids"] == [2047] * 2) == (value > 0), r
        only = {str(i): -100 for i in range(2048) if i != 77}
        assert set(s.generate([5], 5, temperature=1, logit_bias=only)["output_ids"]) == {77}
        r = s.generate([5], 0, logprob_start_len=0)  # scoring
        assert r["output_ids"] == [] and r["meta_info"]["completion_tokens"] == 0
        status, r = s.post("/generate", {"text": ["a"] * 300, "sampling_params": {"max_new_tokens": 1}})
        assert status == 200 and len(r) == 300
        assert s.post("/generate", '{"text": null, "input_ids": [5], "rid": null, "stream": null, '
                      '"sampling_params": {"top_p": null, "max_new_tokens": 1}}')[0] == 200


def test_many_samples_are_refused_cheaply():
    """Prompts times samples have a bound: a small body cannot ask for millions of requests."""
    with Server(EARLY) as s:
        for path, body in (("/generate", {"input_ids": [[5]] * 65536, "sampling_params": {"n": 2}}),
                           ("/v1/completions", {"prompt": [[5]] * 65536, "n": 128})):
            cpu = s.cpu()
            status, r = s.post(path, body)
            assert status == 400 and "65536" in r["message"] and r["message"].startswith("n:"), (status, r)
            assert SLOW or s.cpu() - cpu < 5
        assert s.generate([5], 2)["output_ids"]


def test_json_attacks():
    """C51: depth, size, digits; the server lives and stays quick."""
    with Server(EARLY, "--max-body-bytes", str(8 << 20)) as s:
        for depth in (65, 3000, 10000, 1000000):
            deep = "[" * depth + "]" * depth
            for path, body in (("/generate", '{"text":"a","x":%s}' % deep),
                               ("/v1/chat/completions", '{"messages":[{"role":"user","content":%s}]}' % deep),
                               ("/v1/chat/completions", '{"messages":[{"role":"user","content":"x"}],"tools":[{"type":"function",'
                                '"function":{"name":"f","parameters":{"a":%s}}}]}' % deep)):
                cpu = s.cpu()
                status, r = s.post(path, body)
                assert status == 400 and "deeper" in r["message"], (depth, status)
                assert SLOW or s.cpu() - cpu < 1
        assert s.post("/generate", '{"text":"a","x":%s,"sampling_params":{"max_new_tokens":1}}' % ("[" * 63 + "]" * 63))[0] == 200
        two = '{"prompt":"a","max_tokens":1,"model":"x","model":"y"}'  # the last wins
        assert s.post("/v1/completions", two)[1]["model"] == "y"
        assert s.post("/generate", '{"text":"' + "a" * (9 << 20) + '"}')[0] == 413
        assert s.post("/generate", '{"text":"a","sampling_params":{"max_new_tokens":' + "1" * (1 << 20) + "}}")[0] == 400
        keys = ",".join('"k%d":1' % i for i in range(200000))
        assert s.post("/generate", '{"text":"a","sampling_params":{"max_new_tokens":1},' + keys + "}")[0] == 200
        assert s.get("/health")[0] == 200


def test_json_attacks_on_small_stacks():
    """C51: the same with threads of 256 kB; a big body costs a small multiple of itself."""
    limit = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, ((2048 if SLOW else 256) << 10, limit[1]))
    try:
        s = Server(EARLY)
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, limit)
    with s:
        for depth in (64, 65, 1000000):
            assert s.post("/generate", '{"text":"a","x":' + "[" * depth + "]" * depth + "}")[0] == 400
        assert s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})[0] == 200
        assert s.generate([5], 4)["output_ids"]
        assert s.post("/generate", b'{"text":"a","x":"' + b"a" * (100 << 20) + b'"}')[0] == 413
        s.settle()
        peak, cpu = memory_peak(s), s.cpu()
        body = b'{"input_ids":[5],"sampling_params":{"max_new_tokens":1},"x":"' + b"a" * (50 << 20) + b'"}'
        assert s.post("/generate", body)[0] == 200
        assert SLOW or (memory_peak(s) - peak < 3 * len(body) and s.cpu() - cpu < 5), (memory_peak(s) - peak) / len(body)


def memory_peak(s):
    return int(re.search(r"VmHWM:\s+(\d+)", open(f"/proc/{s.proc.pid}/status").read()).group(1)) << 10


def said(*turns):
    return [{"role": r, "content": c} for r, c in turns]


def test_logits_that_are_not_finite():
    """Weights that are finite, logits that are not: that request ends with an error that names the weight version."""
    with tempfile.TemporaryDirectory() as root:
        bad = os.path.join(root, "bad")
        shutil.copytree(FINAL, bad)
        path = os.path.join(bad, "model-00001-of-00001.safetensors")
        with open(path, "r+b") as f:
            n = struct.unpack("<Q", f.read(8))[0]
            a, b = json.loads(f.read(n))["model.norm.weight"]["data_offsets"]
            f.seek(8 + n + a)
            f.write(b"\x7f\x7f" * ((b - a) // 2))  # 3.4e38, the largest BF16
        with Server(FINAL) as s:
            good = s.generate([5, 6], 8)
            update = lambda folder, version: s.post("/update_weights_from_disk", {"model_path": folder, "weight_version": version})
            assert update(bad, "huge")[0] == 200
            status, r = s.post("/generate", {"input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 8}})
            told = json.dumps(r)
            assert "non-finite" in told and "huge" in told, (status, r)
            status, data = s.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 8, "stream": True}, raw=True)
            assert b"non-finite" in data and b"huge" in data and data.rstrip().endswith(b"[DONE]"), data
            assert s.get("/health")[0] == 200
            assert update(FINAL, "good")[0] == 200
            again = s.generate([5, 6], 8)
            assert again["output_ids"] == good["output_ids"]


ODD_PROMPTS = [  # C53: prompt, status
    ("", 400), ([], 400), ([""], 400), ([[]], 400), (["a", ""], 400), (None, 400), (5, 400), ({"a": 1}, 400), ([None], 400),
    ([5, "a"], 400), (["a", 5], 400), ([[5], []], 400), ([True], 400), (["a"] * 1024, 200), ([[5], [6, 7]], 200), ([5], 200),
]
ODD_MESSAGES = [
    ([], 400), (said(("assistant", "x")), 200), (said(("system", "x")), 200), (said(("user", "")), 200), (said(("user", [])), 200),
    (said(("assistant", "")), 200), (said(("nobody", "x")), 200), (said(("user", 5)), 400), (said((5, "x")), 400),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], 400), ([[]], 400), ([None], 400),
    (said(*[("user", "x")] * 10000), 400),  # longer than the context
]


def test_empty_and_odd_content():
    """C53: each row 200 or 400 with the field's name, streamed (no frame before it) or not; batches in order."""
    with Server(EARLY) as s:
        for path, field, rows in (("/v1/completions", "prompt", ODD_PROMPTS), ("/v1/chat/completions", "messages", ODD_MESSAGES)):
            for value, want in rows:
                for stream in (False, True):
                    body = {field: value, "max_tokens": 1, "temperature": 0, "stream": stream}
                    status, r = s.request("POST", path, json.dumps(body), {"Content-Type": "application/json"}, raw=True)
                    assert status == want, (path, str(value)[:80], stream, status, r[:300])
                    if status == 400:
                        message = json.loads(r)["message"]
                        assert any(word in message for word in (field, "input_ids", "text", "content", "role", "longer than")), message
                    elif not stream:
                        assert [c["index"] for c in json.loads(r)["choices"]] == list(range(len(json.loads(r)["choices"])))
        status, r = s.post("/v1/chat/completions", {"messages": [{"role": "user", "content": None}], "max_tokens": 1})
        assert status in (200, 400), status
        both = {"text": "a", "input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
        assert s.post("/generate", both)[1]["meta_info"]["prompt_tokens"] == 2
        r = s.post("/generate", {**both, "text": None, "input_ids": [[5], [6, 7], [8] * 5]})[1]
        assert [x["meta_info"]["prompt_tokens"] for x in r] == [1, 2, 5]
        assert s.generate([5], 2)["output_ids"]
        s.idle()


def test_routes():
    with Server(EARLY) as s:
        assert s.get("/nothing")[0] == 404
        assert s.request("DELETE", "/generate")[0] == 405
        assert s.post("/v1/completions", "x", headers={"Content-Type": "text/plain"})[0] == 400
        assert s.get("/health", headers={"Authorization": "Bearer None"})[0] == 200
    with Server(EARLY, "--api-key", "k") as s:
        assert s.get("/health")[0] == 200
        assert s.get("/model_info")[0] == 401
        assert s.get("/model_info", headers={"Authorization": "Bearer k"})[0] == 200
        assert s.post("/generate", {"text": "a"}, headers={"Authorization": "Bearer x"})[0] == 401


def test_too_long_and_exact_fit():
    """C59: what can never fit is refused or ended at once; the 20 small ones behind it finish; nothing stands still."""
    with Server(EARLY, "--max-total-tokens", "1024") as s:
        stop, worst = threading.Event(), [0.0]

        def watch():  # how long requests wait with none running
            since = None
            while not stop.is_set():
                load = s.loads()
                stuck = load["num_running_reqs"] == 0 and load["num_waiting_reqs"] > 0
                since = since or time.time() if stuck else None
                worst[0] = max(worst[0], time.time() - since if since else 0)
                time.sleep(0.02)
        w = threading.Thread(target=watch)
        w.start()
        # prompt tokens, max_new_tokens, tokens that come (None: refused); the last one drawn needs no KV
        rows = ((1025, 1, None), (2000, 5, None), (4096, 1, None), (1024, 1, 1), (1024, 5, 1), (1023, 2, 2),
                (10, 3000, 1015), (10, 1014, 1014), (10, 1015, 1015), (10, 1016, 1015))
        for n, new, want in rows[:7] if SLOW else rows:
            got, first = [], threading.Thread(target=lambda: got.append(s.post("/generate", {
                "input_ids": [5] * n, "sampling_params": {"max_new_tokens": new, "ignore_eos": True, "temperature": 0}})))
            first.start()
            small = [threading.Thread(target=s.generate, args=([5, i], 5)) for i in range(20)]
            for x in small:
                x.start()
            for x in [first] + small:
                x.join()
            status, r = got[0]
            if want is None:
                assert status == 400, (n, new, status)
                continue
            assert status == 200 and r["meta_info"]["completion_tokens"] == want, (n, new, status, r["meta_info"])
            assert r["meta_info"]["finish_reason"]["type"] == "length"
        stop.set()
        w.join()
        assert SLOW or worst[0] < 5, worst  # the numbers are those of the last step, which may be slow


def latencies(s, seconds, stop=None):
    """Seven clients asking for 8 tokens each, again and again: how long each answer took."""
    took, end = [], time.time() + seconds

    def ask(i):
        while time.time() < end or (stop and not stop.is_set()):
            t = time.time()
            s.generate([5 + i], 8, ignore_eos=True)
            took.append(time.time() - t)
    ts = [threading.Thread(target=ask, args=(i,)) for i in range(7)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    return sorted(took)


def test_long_runs_of_one_character():
    """C29: megabytes of one character are refused for their length, and seven others go on beside it."""
    with Server(EARLY) as s:
        idle = latencies(s, 2)
        stop, busy = threading.Event(), []
        t = threading.Thread(target=lambda: busy.extend(latencies(s, 0, stop)))
        t.start()
        calls = [(ch, n) for n in (10000, 1000000) for ch in ("a", " ", "_", "\n", "\u6c34\u5c71\u306e")]
        try:
            for ch, n in calls:
                began = time.time()
                status, r = s.post("/v1/completions", {"model": "x", "prompt": ch * (n // len(ch)), "max_tokens": 1})
                assert status == 400 or (n < 1000000 and status == 200), (ch, n, status)
                assert SLOW or time.time() - began < 30, (ch, n, time.time() - began)  # what grows with the square takes hours
            many = [threading.Thread(target=s.post, args=("/v1/completions", {"prompt": " " * 1000000}))
                    for _ in range(6)]
            for x in many:
                x.start()
            for x in many:
                x.join()
        finally:
            stop.set()
            t.join()
        p99 = lambda v: v[int(len(v) * 0.99)]
        print(f"  p99 of the others: idle {p99(idle) * 1e3:.1f} ms, beside long texts {p99(busy) * 1e3:.1f} ms")
        assert len(busy) > 50
        # the tokenizer takes cores from the engine, but nobody waits for a long text to be done
        assert SLOW or p99(busy) < 0.2 + 2 * p99(idle), (p99(idle), p99(busy))
