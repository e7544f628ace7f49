"""The OpenAI routes: with the standard library, and with the real client where it is installed."""
import threading
import time

from harness import EARLY, FINAL, Server

TEXT = ("The school has 11 rows of 10 chairs. 31 of the chairs are taken away. "
        "How many chairs are there at the school now?")


def test_shapes():
    with Server(FINAL) as s:
        models = s.get("/v1/models")[1]
        assert models["object"] == "list" and models["data"][0]["max_model_len"] == 4096
        status, r = s.post("/v1/completions", {"prompt": [32] * 5, "max_tokens": 4, "temperature": 0, "logprobs": 2,
                                               "echo": True, "ignore_eos": True})
        assert status == 200, r
        lp = r["choices"][0]["logprobs"]
        assert lp["token_logprobs"][0] is None and len(lp["token_logprobs"]) == 9 == len(lp["tokens"])
        assert r["usage"] == {**r["usage"], "prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
        status, r = s.post("/v1/completions", {"prompt": ["a"] * 65537, "n": 128})
        assert status == 400 and "65536" in r["message"], (status, r)
        for messages in ([], None, "x", [5], [{"role": "user"}], [{"content": "x"}]):
            status, r = s.post("/v1/chat/completions", {"messages": messages})
            assert status == 400 and r["message"], (messages, r)
        # many tokens are parts of characters and look alike: as keys they are one (harness.strict looks)
        status, r = s.post("/v1/completions", {"prompt": "\u6c34", "max_tokens": 4, "logprobs": 128, "echo": True})
        assert status == 200, r
        parts = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
        plain = [{"role": "user", "content": TEXT}]
        a, b = (s.post("/v1/chat/completions", {"messages": m, "temperature": 0, "max_tokens": 120})[1]
                for m in (parts, plain))
        assert a["choices"][0]["message"]["content"] == b["choices"][0]["message"]["content"]
        assert "79" in a["choices"][0]["message"]["content"]
        assert a["choices"][0]["finish_reason"] == "stop" or a["usage"]["completion_tokens"] == 120


def test_extras():
    with Server(FINAL, "--served-model-name", "org/tiny") as s:
        assert s.get("/v1/models/org/tiny") == (200, s.get("/v1/models")[1]["data"][0])
        for name in ("other", "org", "org/tiny/x", "x" * 3000):
            status, r = s.get("/v1/models/" + name)
            assert status == 404 and r["error"]["code"] == "model_not_found" and r["error"]["param"] == "model", r
        assert s.get("/v1/models/")[0] == 404
        ask = {"prompt": [5], "max_tokens": 1}
        assert s.post("/v1/completions", {**ask, "best_of": 1})[0] == s.post("/v1/completions", {**ask, "best_of": None})[0] == 200
        for bad in (0, 2, "1"):
            status, r = s.post("/v1/completions", {**ask, "best_of": bad})
            assert status == 400 and "best_of" in r["message"], (status, r)
        said = [{"role": "user", "content": "x"}]
        chat = {"messages": said, "max_tokens": 1}
        for path, body in (("/v1/completions", ask), ("/v1/chat/completions", chat)):
            assert s.post(path, body)[1]["metadata"] == {"weight_version": "default", "weight_versions": [["default", 1]]}
            r = s.post(path, {**body, "rid": "my-id"})[1]
            assert r["id"] == "my-id", r
            assert [c["index"] for c in s.post(path, {**body, "rid": "my-id", "n": 3})[1]["choices"]] == [0, 1, 2]
            status, r = s.post(path, {**body, "rid": "r" * 128})
            assert status == 400 and "rid" in r["message"], (status, r)
            assert s.post(path, {**body, "rid": "r" * 127})[1]["id"] == "r" * 127
            assert s.post(path, {**body, "rid": ""})[0] == 400


def test_text_offsets():
    """Where a token begins in the choice's text, in characters; streamed or not, with the prompt or without."""
    with Server(FINAL) as s:
        for echo in (False, True):
            for stop in (None, "chairs"):
                body = {"prompt": "\u6c34 caf\u00e9\n\nQuestion: " + TEXT + "\nAnswer:", "max_tokens": 40, "temperature": 0, "logprobs": 0,
                        "echo": echo, "stop": stop, "ignore_eos": True}
                c = s.post("/v1/completions", body)[1]["choices"][0]
                lp = c["logprobs"]
                assert len(lp["text_offset"]) == len(lp["tokens"]) > 5
                assert lp["text_offset"][0] == 0
                for at, nxt, token in zip(lp["text_offset"], lp["text_offset"][1:] + [None], lp["tokens"]):
                    if "\ufffd" in token or token == "<|im_end|>" or at + len(token) > len(c["text"]):
                        continue
                    assert c["text"][at:at + len(token)] == token, (at, token, c["text"])
                    assert nxt in (None, at + len(token))
                got = []
                for f in s.stream("/v1/completions", body):
                    got += f["choices"][0]["logprobs"]["text_offset"]
                assert got == lp["text_offset"], (got, lp["text_offset"])


def test_client():
    try:
        import openai
    except ImportError:
        print("skip test_client: the openai client is not installed")
        return
    with Server(FINAL, "--served-model-name", "tiny") as s:
        c = openai.OpenAI(base_url=f"http://127.0.0.1:{s.port}/v1", api_key="None")
        assert [m.id for m in c.models.list()] == ["tiny"]
        messages = [{"role": "user", "content": TEXT}]
        r = c.chat.completions.create(model="tiny", messages=messages, temperature=0, logprobs=True, top_logprobs=3)
        said = r.choices[0].message.content
        assert "79" in said and r.usage.completion_tokens == len(r.choices[0].logprobs.content)
        pieces, usage = [], None
        for chunk in c.chat.completions.create(model="tiny", messages=messages, temperature=0, stream=True,
                                               stream_options={"include_usage": True}):
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
            usage = chunk.usage or usage
        assert "".join(pieces) == said and usage.completion_tokens == r.usage.completion_tokens
        try:
            c.chat.completions.create(model="tiny", messages=messages, temperature=-1)
            raise AssertionError("temperature -1 was taken")
        except openai.BadRequestError as e:
            assert "temperature" in e.message, e.message
        with c.completions.create(model="tiny", prompt="x", max_tokens=3900, stream=True,
                                  extra_body={"ignore_eos": True}) as stream:
            next(iter(stream))
        s.idle(20)
        assert s.generated() < 3900
