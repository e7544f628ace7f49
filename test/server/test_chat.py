"""Chat: tools and reasoning of models whose output is known token by token, and of calls that must come."""
import json
import tempfile

import checkpoint
from harness import FINAL, SLOW, Server
from test_chain import Chain, START, follow

TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["C", "F"]}}, "required": ["city"],
    "additionalProperties": False}}}, {"type": "function", "function": {"name": "stop"}}]
SAID = [{"role": "user", "content": "hi"}]
QWEN = ["<thi", "nk>\nLet ", "me see", ".\n</thi", "nk>\n\n", "I will ask.\n<tool", "_call>\n{\"na", "me\": \"get_", "weather\", \"argu",
        "ments\": {\"ci", "ty\": \"K\u00f6ln", "\"}}\n</tool_", "call>\n<tool_call>", "\n{\"name\": \"stop", "\", \"arguments\"", ": {}}\n</tool_call> "]
DEEPSEEK = ["Sure. <\uff5ctool\u2581calls\u2581be", "gin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>func", "tion<\uff5ctool\u2581sep\uff5c>get_", "weather\n```js",
            "on\n{\"city\": ", "\"K\u00f6ln\"}", "\n```<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"]


def joined(frames):
    """What the deltas of a stream say in all, as a message; roles and finish."""
    m = {"content": "", "reasoning_content": "", "tool_calls": []}
    roles, finish = 0, None
    for f in frames:
        if not f["choices"]:
            continue
        c = f["choices"][0]
        d = c["delta"]
        roles += "role" in d
        for k in ("content", "reasoning_content"):
            m[k] += d.get(k) or ""
        for t in d.get("tool_calls") or []:
            if "id" in t:
                assert t["index"] == len(m["tool_calls"]) and t["type"] == "function"
                m["tool_calls"].append({"name": t["function"]["name"], "arguments": ""})
            m["tool_calls"][t["index"]]["arguments"] += t["function"]["arguments"]
        finish = c["finish_reason"] or finish
    return m, roles, finish


def plain(message):
    return {"content": message["content"] or "", "reasoning_content": message["reasoning_content"] or "",
            "tool_calls": [{"name": t["function"]["name"], "arguments": t["function"]["arguments"]} for t in message["tool_calls"] or []]}


def known(pieces, *flags):
    """A server that answers START with the pieces, each a token, and then ends."""
    ids = list(range(256, 256 + len(pieces)))
    return Chain(*flags, steps=follow(ids + [1]), extra=[p.encode() for p in pieces], eos=1)


def test_turns():
    """Reasoning and calls of both families: whole and streamed say the same; usage counts the reasoning."""
    ask = {"input_ids": [START], "temperature": 0, "tools": TOOLS}
    with known(QWEN, "--tool-call-parser", "qwen", "--reasoning-parser", "qwen3") as s:
        r = s.post("/v1/chat/completions", ask)[1]
        want = {"content": "I will ask.", "reasoning_content": "Let me see.", "tool_calls": [
            {"name": "get_weather", "arguments": "{\"city\": \"K\u00f6ln\"}"}, {"name": "stop", "arguments": "{}"}]}
        m = r["choices"][0]["message"]
        assert plain(m) == want and r["choices"][0]["finish_reason"] == "tool_calls", r
        assert all(t["id"].startswith("call_") and t["type"] == "function" for t in m["tool_calls"]) and m["tool_calls"][0]["id"] != m["tool_calls"][1]["id"]
        assert r["usage"]["reasoning_tokens"] == 5 == r["usage"]["completion_tokens_details"]["reasoning_tokens"], r["usage"]
        frames = s.stream("/v1/chat/completions", {**ask, "stream_options": {"include_usage": True, "continuous_usage_stats": True}})
        assert joined(frames) == (want, 1, "tool_calls"), frames
        assert frames[-1]["choices"] == [] and frames[-1]["usage"] == r["usage"]
        assert all(f["metadata"]["weight_version"] == "default" and f["usage"]["prompt_tokens"] == 1 for f in frames)
        assert [f["usage"]["completion_tokens"] for f in frames] == sorted(f["usage"]["completion_tokens"] for f in frames)
        # the name comes in one piece, before any arguments
        begun = [t for f in frames if f["choices"] for t in f["choices"][0]["delta"].get("tool_calls") or [] if "id" in t]
        assert [t["function"]["name"] for t in begun] == ["get_weather", "stop"]
        lp = s.stream("/v1/chat/completions", {**ask, "logprobs": True})
        assert sum(len(f["choices"][0]["logprobs"]["content"]) for f in lp if f["choices"][0]["logprobs"]) == r["usage"]["completion_tokens"]
        # nothing is looked for: no tools, none, not separated
        raw = "".join(QWEN)
        for extra, reasoning, content in (({"tools": None}, "Let me see.", raw.split("</think>\n\n")[1]), ({"tool_choice": "none"}, "Let me see.", raw.split("</think>\n\n")[1]),
                                          ({"separate_reasoning": False, "tools": None}, None, raw)):
            c = s.post("/v1/chat/completions", {**ask, **extra})[1]["choices"][0]
            assert c["message"]["content"] == content and c["message"]["reasoning_content"] == reasoning and c["finish_reason"] == "stop", c
            assert c["message"]["tool_calls"] is None
    with known(QWEN) as s:  # the template of this model knows no calls: the text stays as it is
        c = s.post("/v1/chat/completions", ask)[1]["choices"][0]
        assert c["message"]["content"] == "".join(QWEN) and c["finish_reason"] == "stop"
    with known(DEEPSEEK, "--tool-call-parser", "deepseekv3") as s:
        r = s.post("/v1/chat/completions", ask)[1]["choices"][0]
        want = {"content": "Sure.", "reasoning_content": "", "tool_calls": [{"name": "get_weather", "arguments": "{\"city\": \"K\u00f6ln\"}"}]}
        assert plain(r["message"]) == want and r["finish_reason"] == "tool_calls", r
        assert joined(s.stream("/v1/chat/completions", ask)) == (want, 1, "tool_calls")


def check_call(call, named=None):
    name, a = call["name"], json.loads(call["arguments"])
    assert name in ("get_weather", "stop") and (not named or name == named), call
    if name == "get_weather":
        assert set(a) <= {"city", "unit"} and len(a["city"]) <= 12 and a.get("unit") in (None, "C", "F"), a
    assert isinstance(a, dict)


def test_calls_that_must_come():
    """required and named: whatever the model would say, calls of the tools with arguments of their schemas come."""
    n = 4
    for parser in ("qwen",) if SLOW else ("qwen", "deepseekv3"):
        with Server(FINAL, "--tool-call-parser", parser) as s:
            for choice, named in (("required", None), ({"type": "function", "function": {"name": "get_weather"}}, "get_weather")):
                body = {"messages": SAID, "tools": TOOLS, "tool_choice": choice, "temperature": 1.4, "seed": 5, "n": n, "max_tokens": 250}
                r = s.post("/v1/chat/completions", body)[1]
                done = 0
                for c in r["choices"]:
                    calls = plain(c["message"])["tool_calls"]
                    if c["finish_reason"] == "tool_calls":
                        assert calls and c["message"]["content"] is None, c
                        done += 1
                        assert not named or len(calls) == 1
                        for t in calls:
                            check_call(t, named)
                assert done and all(c["finish_reason"] in ("tool_calls", "length") for c in r["choices"]), r
                one = s.post("/v1/chat/completions", {**body, "n": 1})[1]["choices"][0]
                assert joined(s.stream("/v1/chat/completions", {**body, "n": 1}))[0] == plain(one["message"])
            one = s.post("/v1/chat/completions", {**body, "tool_choice": "required", "parallel_tool_calls": False})[1]
            assert all(len(c["message"]["tool_calls"]) == 1 for c in one["choices"])


def test_formats_beside_reasoning():
    """A format holds from the start where a turn does not begin with reasoning, after it where it does."""
    schema = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"], "additionalProperties": False}
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    with Server(FINAL, "--tool-call-parser", "qwen", "--reasoning-parser", "qwen3") as s:  # this model knows no reasoning
        m = s.post("/v1/chat/completions", {"messages": SAID, "temperature": 0, "max_tokens": 60, **form})[1]["choices"][0]["message"]
        assert 0 <= json.loads(m["content"])["a"] <= 9 and not m["reasoning_content"], m
        c = s.post("/v1/chat/completions", {"messages": SAID, "temperature": 0, "max_tokens": 250, "tools": TOOLS, "tool_choice": "required"})[1]["choices"][0]
        assert c["finish_reason"] == "length" or plain(c["message"])["tool_calls"], c
    with known(["<think>", "Let me see.", "</think>", "\n\n", "{\"a\":", " 7}"], "--reasoning-parser", "qwen3") as s:
        m = s.post("/v1/chat/completions", {"input_ids": [START], "temperature": 0, **form})[1]["choices"][0]["message"]
        assert m["reasoning_content"] == "Let me see." and json.loads(m["content"]) == {"a": 7}, m


def test_bad_tools():
    f = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"multipleOf": 3}}, "required": ["x"]}}
    rows = [({"tools": 5}, "tools"), ({"tools": [{"type": "x"}]}, "tools[0].type"), ({"tools": [{"type": "function", "function": {}}]}, "name"),
            ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"), ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "no tool is named"),
            ({"tool_choice": "required"}, "needs tools"), ({"tools": [{"type": "function", "function": f}], "tool_choice": "required"}, "multipleOf"),
            ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude"),
            ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls"), ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
            ({"continue_final_message": True}, "continue_final_message"), ({"functions": [f]}, "functions"),
            ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "parameters")]
    with Server(FINAL, "--tool-call-parser", "qwen") as s:
        for extra, named in rows:
            status, r = s.post("/v1/chat/completions", {"messages": SAID, **extra})
            assert status == 400 and named in r["message"], (extra, status, r)
        assert s.post("/v1/chat/completions", {"messages": SAID, "max_tokens": 2, "tools": [{"type": "function", "function": f}]})[0] == 200
    with Server(FINAL) as s:
        status, r = s.post("/v1/chat/completions", {"messages": SAID, "tools": TOOLS, "tool_choice": "required"})
        assert status == 400 and "--tool-call-parser" in r["message"], r


TEMPLATE = ("{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{% if m.tool_calls %}{% for t in m.tool_calls %}"
            "{{ t.function.name + '<tool_call>' }}{{ t.function.arguments.items() | list }}{% endfor %}{% endif %}{{ m.content + '' }}{% endfor %}"
            "{% if add_generation_prompt %}[a]{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{{ reasoning_effort }}{% endif %}")


def test_rendering():
    """What the template sees: tools, parsed arguments, a developer as system, an empty content, extra variables."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]}
    rows = [({"messages": SAID}, "[user]hi[a]"),
            ({"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}]}, "[system]d[user]xy[a]"),
            ({"messages": SAID + [call, {"role": "tool", "tool_call_id": "1", "content": "r"}]}, "[user]hi[assistant]f<tool_call>[('a', 1)][tool]r[a]"),
            ({"messages": SAID + [{**call, "content": ""}]}, "[user]hi[assistant]f<tool_call>[('a', 1)][a]"),
            ({"messages": SAID, "chat_template_kwargs": {"enable_thinking": False}}, "[user]hi[a]<think></think>"),
            ({"messages": SAID, "reasoning_effort": "low"}, "[user]hi[a]low"),
            ({"messages": SAID, "add_generation_prompt": False}, "[user]hi"),
            ({"messages": SAID + [{"role": "assistant", "content": "He"}], "continue_final_message": True}, "[user]hi[a]He"),
            ({"messages": SAID, "tools": [{"type": "function", "function": {"name": "\u00e9"}}]}, "[{\"type\": \"function\", \"function\": {\"name\": \"\u00e9\"}}][user]hi[a]"),
            ({"messages": SAID, "tools": TOOLS, "tool_choice": "none"}, "[user]hi[a]")]
    with tempfile.TemporaryDirectory() as d:
        checkpoint.chain(d, steps={}, tokenizer_config={"chat_template": TEMPLATE})
        with Server(d) as s:
            for body, want in rows:
                r = s.post("/v1/chat/completions", {**body, "max_tokens": 1, "return_prompt_token_ids": True})[1]
                ids = s.post("/v1/completions", {"prompt": want, "max_tokens": 1, "return_prompt_token_ids": True})[1]
                assert r["choices"][0]["prompt_token_ids"] == ids["choices"][0]["prompt_token_ids"], (body, r, ids)
