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
        parts = [{"role": "user", "content": [{"type": "text", "text": TEXT}]}]
        plain = [{"role": "user", "content": TEXT}]
        a, b = (s.post("/v1/chat/completions", {"messages": m, "temperature": 0, "max_tokens": 120})[1]
                for m in (parts, plain))
        assert a["choices"][0]["message"]["content"] == b["choices"][0]["message"]["content"]
        assert "79" in a["choices"][0]["message"]["content"]
        assert a["choices"][0]["finish_reason"] == "stop" or a["usage"]["completion_tokens"] == 120


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
        s.idle(3)
