"""The fields of the OpenAI routes by name, what lm-eval asks, and the real openai client where it is installed."""
import http.client
import json
import socket
import tempfile
import threading
import time

import checkpoint
from harness import FINAL, Server, free_port
from test_chain import START
from test_chat import QWEN, SAID, TOOLS, known
from test_grammar import PERSON, valid

OBJECT = {"type": "json_object"}
# Fields that clients send: (name, a value that is taken, one that is refused with its name).  None: there is none.
BOTH = [("model", "anything", 5), ("max_tokens", 3, 0), ("n", 2, 0), ("temperature", 0.5, -1), ("top_p", 0.5, 0), ("top_k", 5, 0), ("min_p", 0.1, 2),
        ("repetition_penalty", 1.1, 0), ("frequency_penalty", 0.5, 3), ("presence_penalty", -0.5, "x"), ("seed", 7, -1), ("stop", ["zz", "q"], [""]),
        ("stop", "zz", 5), ("stop_token_ids", [5, None], ["a"]), ("logit_bias", {"5": -100}, {"5000": 1}), ("stream", False, "yes"),
        ("stream_options", {"include_usage": True}, 5), ("stream_options", {"continuous_usage_stats": True}, {"include_usage": 5}), ("min_tokens", 2, -1),
        ("ignore_eos", True, 1), ("skip_special_tokens", False, 1), ("no_stop_trim", True, "x"), ("rid", "r1", 5), ("extra_key", "a", 5), ("cache_salt", "b", 5),
        ("priority", 3, "x"), ("return_prompt_token_ids", True, 1), ("return_meta_info", True, 1), ("regex", "[ab]+", "("), ("json_schema", "{}", "{"),
        ("response_format", OBJECT, {"type": "x"}), ("ebnf", None, "root ::= x"), ("structural_tag", None, "x"), ("stop_regex", "zz+", "("), ("lora_path", None, "x"),
        ("return_hidden_states", False, True), ("return_indexer_topk", False, True), ("user", "me", None), ("metadata", {"a": "b"}, None), ("custom_params", {"a": 1}, None),
        ("spaces_between_special_tokens", False, None), ("return_routed_experts", True, 5), ("routed_experts_start_len", 0, 999), ("return_cached_tokens_details", True, None),
        ("no_such_field", {"x": [1]}, None), ("store", False, None), ("service_tier", "auto", None), ("prompt_cache_key", "k", None), ("safety_identifier", "s", None),
        ("session_id", "s", None)]
CHAT = [("max_completion_tokens", 3, 0), ("logprobs", True, 5), ("top_logprobs", 3, 999), ("tools", TOOLS, 5), ("tool_choice", "auto", "maybe"),
        ("parallel_tool_calls", False, 5), ("chat_template_kwargs", {"enable_thinking": False}, 5), ("reasoning_effort", "low", 5), ("separate_reasoning", False, 5),
        ("input_ids", [5, 6], [99999]), ("add_generation_prompt", False, 5), ("continue_final_message", False, 5), ("stream_reasoning", True, None),
        ("verbosity", "low", None), ("modalities", ["text"], None), ("prediction", {"type": "content"}, None), ("audio", None, {"voice": "x"}), ("functions", None, [{"name": "f"}])]
TEXT = [("prompt", "a", 5), ("prompt", [5, 6], [99999]), ("prompt", ["a", "b"], []), ("prompt", [[5], [6, 7]], [[]]), ("echo", True, 5), ("logprobs", 3, -1),
        ("best_of", 1, 2), ("suffix", "", "x")]


def test_fields_by_name():
    with Server(FINAL, "--tool-call-parser", "qwen") as s:
        for path, base, rows in (("/v1/chat/completions", {"messages": SAID, "max_tokens": 2}, BOTH + CHAT), ("/v1/completions", {"prompt": "a", "max_tokens": 2}, BOTH + TEXT)):
            for name, good, bad in rows:
                body = {k: v for k, v in base.items() if not (k == "max_tokens" and name in ("max_completion_tokens", "min_tokens"))}
                if name == "min_tokens":
                    body["max_tokens"] = 3
                if good is not None:
                    status, r = s.post(path, {**body, name: good})
                    assert status == 200 and r["usage"]["completion_tokens"] >= 1, (path, name, good, status, r)
                status, r = s.post(path, {**body, name: None})
                assert (status == 400) == (name == "prompt"), (path, name, status, r)
                if bad is not None:
                    status, r = s.post(path, {**body, name: bad})
                    said = {"prompt": "input_ids" if bad == [[]] else "prompt"}.get(name, "include_usage" if bad == {"include_usage": 5} else name)
                    assert status == 400 and said in r["message"], (path, name, bad, status, r)
                    assert r["object"] == "error" and r["type"] == "BadRequestError" and r["code"] == 400 and r["param"] is None, r
                    assert r["error"]["message"] == r["message"]
            for rank, want in (("0", 200), ("1", 400), ("x", 400)):
                status, r = s.post(path, base, headers={"X-Data-Parallel-Rank": rank})
                assert status == want and (status == 200 or "X-Data-Parallel-Rank" in r["message"]), (rank, status, r)
            c = http.client.HTTPConnection("127.0.0.1", s.port)
            for content_type, want in (("text/plain", 400), ("application/json; charset=utf-8", 200), ("", 400)):
                c.request("POST", path, json.dumps(base), {"Content-Type": content_type} if content_type else {})
                r = c.getresponse()
                r.read()
                assert r.status == want, (content_type, r.status)


def test_meta_info_and_defaults():
    with Server(FINAL, "--enable-cache-report") as s:
        ids = s.post("/v1/completions", {"prompt": "Question: " * 20, "max_tokens": 1, "return_prompt_token_ids": True})[1]["choices"][0]["prompt_token_ids"]
        body = {"input_ids": ids, "messages": SAID, "logprobs": True, "return_meta_info": True, "no_stop_trim": False, "max_tokens": 9, "temperature": 0, "rid": "mine",
                "return_prompt_token_ids": True}
        r = s.post("/v1/chat/completions", body)[1]
        meta, c = r["choices"][0]["meta_info"], r["choices"][0]
        n = s.generate(ids, 9, rid="mine")
        assert c["prompt_token_ids"] == ids and meta["output_token_logprobs"] == n["meta_info"]["output_token_logprobs"]
        assert set(meta) >= set(n["meta_info"]) and meta["id"] == "mine" and meta["completion_tokens"] == len(meta["output_token_logprobs"])
        assert [t["logprob"] for t in c["logprobs"]["content"]] == [t[0] for t in meta["output_token_logprobs"]]
        assert meta["finish_reason"]["type"] == c["finish_reason"] and meta["weight_version"] == "default"
        again = s.post("/v1/chat/completions", body)[1]["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] >= 16, again
        r = s.post("/v1/completions", {"prompt": [ids, ids], "max_tokens": 2, "return_meta_info": True, "logprobs": 1})[1]
        assert all(len(c["meta_info"]["output_token_logprobs"]) == 2 for c in r["choices"])
        status, r = s.post("/v1/chat/completions", {**body, "stream": True})
        assert status == 400 and "return_meta_info" in r["message"], r
        salted = s.post("/v1/chat/completions", {**body, "cache_salt": "x", "extra_key": "y"})[1]["usage"]
        assert salted["prompt_tokens_details"]["cached_tokens"] == 0
    said = {"messages": SAID, "max_tokens": 40, "seed": 3, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as d:  # at temperature 1 this model says 11, at its generation_config's anything
        checkpoint.chain(d, steps={START: 11}, generation={"temperature": 1000.0})
        got = {}
        for flag in ("model", "openai"):
            with Server(d, "--sampling-defaults", flag) as s:
                texts = [s.post("/v1/chat/completions", {**said, "input_ids": [START], "max_tokens": 1, "seed": i, "logprobs": True})[1]["choices"][0] for i in range(20)]
                got[flag] = {tuple(t["logprobs"]["content"][0]["bytes"]) for t in texts}
        assert got["openai"] == {(11,)} and len(got["model"]) > 5, got


def test_routed_experts():
    """sglext.routed_experts is what /generate returns of the same tokens; streamed, in a chunk of its own."""
    with Server(FINAL, "--enable-return-routed-experts") as s:
        ids = list(range(40, 70))
        want = s.post("/generate", {"input_ids": ids, "return_routed_experts": True, "routed_experts_start_len": 3,
                                    "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}})[1]["meta_info"]["routed_experts"]
        ask = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_routed_experts": True, "routed_experts_start_len": 3, "stream_options": {"include_usage": True}}
        for path, body in (("/v1/chat/completions", {**ask, "messages": SAID, "input_ids": ids}), ("/v1/completions", {**ask, "prompt": ids})):
            r = s.post(path, {**body, "return_meta_info": True})[1]
            assert r["sglext"]["routed_experts"] == want == r["choices"][0]["meta_info"]["routed_experts"], r
            chunks = [f for f in s.stream(path, body) if "sglext" in f]
            assert len(chunks) == 1 and chunks[0]["choices"] == [] and chunks[0]["sglext"] == {"routed_experts": want}
            assert "sglext" not in s.post(path, {**body, "return_routed_experts": False})[1]
        status, r = s.post("/v1/completions", {**ask, "prompt": ids, "routed_experts_start_len": 31})
        assert status == 400 and "routed_experts_start_len" in r["message"], r
    with Server(FINAL) as s:  # not kept: the key is absent
        assert "sglext" not in s.post("/v1/completions", {**ask, "prompt": ids})[1]


def test_lm_eval_requests():
    """local-completions' loglikelihood: batches of ids, echo, one token, logprobs 1; against scores of /generate."""
    with Server(FINAL) as s:
        text = s.generate("Question: The school has 11 rows of 10 chairs.", 30)["output_ids"]
        rows = [(text[:10], text[10:14]), ([5, 6, 7], [8]), (text[:3], text[3:20])]
        r = s.post("/v1/completions", {"model": "m", "prompt": [a + b for a, b in rows], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True})[1]
        for c, (a, b) in zip(sorted(r["choices"], key=lambda c: c["index"]), rows):
            lp, top = c["logprobs"]["token_logprobs"][len(a):-1], c["logprobs"]["top_logprobs"][len(a):-1]
            want = s.post("/generate", {"input_ids": a + b, "sampling_params": {"max_new_tokens": 0, "temperature": 0}, "return_logprob": True, "logprob_start_len": len(a) - 1})[1]
            assert lp == [x[0] for x in want["meta_info"]["input_token_logprobs"][1:]] and len(lp) == len(b)
            assert all(len(t) == 1 and max(t.values()) >= x - 1e-6 for t, x in zip(top, lp))


class Busy(threading.Thread):
    """Answers 503 or 429 with Retry-After once, then hands the connection's request on: a proxy that is full at first."""

    def __init__(self, port, status):
        super().__init__(daemon=True)
        self.port, self.status, self.listen, self.seen = port, status, free_port(), 0
        self.socket = socket.create_server(("127.0.0.1", self.listen))
        self.start()

    def run(self):
        while True:
            try:
                c, _ = self.socket.accept()
            except OSError:
                return
            data = b""
            while b"\r\n\r\n" not in data:
                data += c.recv(65536)
            head, body = data.split(b"\r\n\r\n", 1)
            n = int([h.split(b":")[1] for h in head.split(b"\r\n") if h.lower().startswith(b"content-length")][0])
            while len(body) < n:
                body += c.recv(65536)
            self.seen += 1
            if self.seen == 1:
                c.sendall(b"HTTP/1.1 %d Busy\r\nRetry-After: 0\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}" % self.status)
            else:
                k = http.client.HTTPConnection("127.0.0.1", self.port)
                k.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                r = k.getresponse()
                out = r.read()
                c.sendall(b"HTTP/1.1 %d OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (r.status, len(out)) + out)
            c.close()


def test_retry_after():
    """A full queue is 503 with Retry-After; without --max-queued-requests there is no limit."""
    with Server(FINAL, "--max-running-requests", "1", "--max-queued-requests", "1") as s:
        seen = []

        def ask():
            c = http.client.HTTPConnection("127.0.0.1", s.port)
            c.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 200, "ignore_eos": True}), {"Content-Type": "application/json"})
            r = c.getresponse()
            seen.append((r.status, r.getheader("Retry-After"), r.read()))
        threads = [threading.Thread(target=ask) for _ in range(12)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        full = [x for x in seen if x[0] == 503]
        assert full and all(x[1] == "1" and b"queue is full" in x[2] for x in full) and len(full) < 12, seen
    with Server(FINAL, "--max-running-requests", "1") as s:
        r = [None] * 40
        threads = [threading.Thread(target=lambda i=i: r.__setitem__(i, s.post("/v1/completions", {"prompt": "x", "max_tokens": 3})[0])) for i in range(40)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert r == [200] * 40, r


def test_openai_client():
    try:
        import openai
    except ImportError:
        print("skip test_openai_client: the openai client is not installed")
        return
    with known(QWEN, "--tool-call-parser", "qwen", "--reasoning-parser", "qwen3") as s:
        c = openai.OpenAI(base_url=f"http://127.0.0.1:{s.port}/v1", api_key="x")
        ask = {"model": "m", "messages": SAID, "tools": TOOLS, "temperature": 0, "extra_body": {"input_ids": [START]}}
        m = c.chat.completions.create(**ask).choices[0]
        assert m.finish_reason == "tool_calls" and m.message.reasoning_content == "Let me see."
        assert [(t.function.name, t.function.arguments) for t in m.message.tool_calls] == [("get_weather", "{\"city\": \"K\u00f6ln\"}"), ("stop", "{}")]
        with c.chat.completions.stream(**ask) as stream:  # the client's own assembly of deltas
            for _ in stream:
                pass
            last = stream.get_final_completion().choices[0]
        assert [(t.function.name, t.function.arguments) for t in last.message.tool_calls] == [(t.function.name, t.function.arguments) for t in m.message.tool_calls]
        assert last.message.content == m.message.content == "I will ask." and last.finish_reason == "tool_calls"
    with Server(FINAL, "--tool-call-parser", "qwen") as s:
        c = openai.OpenAI(base_url=f"http://127.0.0.1:{s.port}/v1", api_key="x")
        schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}
        r = c.chat.completions.create(model="m", messages=SAID, response_format=schema, seed=1, temperature=0.5, max_tokens=400).choices[0]
        assert r.finish_reason != "stop" or valid(PERSON, r.message.content)
        t = c.chat.completions.create(model="m", messages=SAID, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_weather"}}, temperature=0.5,
                                      seed=2, max_tokens=300).choices[0].message.tool_calls
        assert t[0].function.name == "get_weather" and t[0].id.startswith("call_")
        for bad, named in (({"temperature": 9e99}, "temperature"), ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}}, "not")):
            try:
                c.chat.completions.create(model="m", messages=SAID, **bad)
                raise AssertionError("taken: " + str(bad))
            except openai.BadRequestError as e:
                assert named in e.message and e.status_code == 400, e.message
        for status in (429, 503):  # tried again by the client itself
            front = Busy(s.port, status)
            d = openai.OpenAI(base_url=f"http://127.0.0.1:{front.listen}/v1", api_key="x")
            assert d.chat.completions.create(model="m", messages=SAID, max_tokens=2).usage.completion_tokens >= 1 and front.seen == 2
            front.socket.close()
        with c.chat.completions.create(model="m", messages=SAID, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
        s.idle(20)
        before = s.generated()
        late = openai.OpenAI(base_url=f"http://127.0.0.1:{s.port}/v1", api_key="x", timeout=0.3, max_retries=0)
        try:
            late.chat.completions.create(model="m", messages=SAID, max_tokens=3500, extra_body={"ignore_eos": True})
        except openai.APITimeoutError:
            s.idle(20)
            assert s.generated() - before < 3500, "it went on for a client that had left"
