"""Grammars on the routes: what is generated is of them, whatever runs beside it; refusals name the construct."""
import json
import re
import threading

from harness import FINAL, SLOW, Server

try:
    import jsonschema
except ImportError:
    jsonschema = None
    print("skip the schema validator in test_grammar: jsonschema is not installed")

PERSON = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags"], "properties": {
    "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 130},
    "tags": {"type": "array", "items": {"enum": ["a", "b\n", None]}, "maxItems": 3}}}
NODE = {"type": "object", "properties": {"v": {"type": "number"}, "kids": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}}, "required": ["v", "kids"]}
REGEX = r"(\d{3}-){2}\d{4}|[a-f]+ é (yes|no)"


def valid(schema, text):
    v = json.loads(text)
    if jsonschema:
        jsonschema.validate(v, schema)
    return v


def native(s, sp, n=1, **k):
    status, r = s.post("/generate", {"text": "Question:", "sampling_params": {"max_new_tokens": 600, "n": n, **sp}, **k})
    assert status == 200, (status, r)
    return r if isinstance(r, list) else [r]


def test_grammar_outputs():
    """Temperature 1.5, many seeds: every output that ends is valid, and so is each by the OpenAI spellings."""
    n = 4 if SLOW else 12
    with Server(FINAL) as s:
        for r in native(s, {"regex": REGEX, "temperature": 1.5, "sampling_seed": 3}, n, return_logprob=True):
            assert r["meta_info"]["finish_reason"]["type"] == "stop" and re.fullmatch(REGEX, r["text"]), r
            assert all(-3e38 < lp[0] <= 0 for lp in r["meta_info"]["output_token_logprobs"])
        ended = 0
        for schema in (PERSON, NODE):
            for r in native(s, {"json_schema": json.dumps(schema), "temperature": 1.5, "sampling_seed": 4}, n):
                if r["meta_info"]["finish_reason"]["type"] == "stop":
                    valid(schema, r["text"])
                    ended += 1
        assert ended > n, ended
        said = [{"role": "user", "content": "hi"}]
        for body in ({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "strict": True, "schema": PERSON}}},
                     {"json_schema": PERSON}, {"json_schema": json.dumps(PERSON)}):
            status, r = s.post("/v1/chat/completions", {"messages": said, "temperature": 1.2, "n": 4, "seed": 1, "max_tokens": 400, **body})
            assert status == 200, r
            for c in r["choices"]:
                assert c["finish_reason"] != "stop" or valid(PERSON, c["message"]["content"])
            status, r = s.post("/v1/completions", {"prompt": "x", "temperature": 1.2, "seed": 1, "max_tokens": 400, **body})
            assert status == 200 and (r["choices"][0]["finish_reason"] != "stop" or valid(PERSON, r["choices"][0]["text"])), r
        status, r = s.post("/v1/chat/completions", {"messages": said, "response_format": {"type": "json_object"}, "n": 8, "seed": 2,
                                                    "max_tokens": 300, "temperature": 1.3})
        assert status == 200, r
        for c in r["choices"]:
            assert c["message"]["content"].startswith("{")
            assert c["finish_reason"] != "stop" or isinstance(json.loads(c["message"]["content"]), dict)
        r = s.post("/v1/completions", {"prompt": "x", "regex": "(yes|no)", "temperature": 0})[1]
        assert r["choices"][0]["text"] in ("yes", "no") and r["choices"][0]["finish_reason"] == "stop", r
        # ignore_eos does not go beyond a grammar; text is a type of response_format that asks for nothing
        assert native(s, {"regex": "ab", "ignore_eos": True})[0]["text"] == "ab"
        assert s.post("/v1/completions", {"prompt": "x", "response_format": {"type": "text"}, "max_tokens": 2})[0] == 200


def test_grammar_is_repeated_exactly():
    """The same bits alone, among others with other grammars, after retractions, streamed, and from a warm cache."""
    bodies = [{"text": "Question: " + "ab" * i, "sampling_params": {"temperature": 1.1, "sampling_seed": i, "max_new_tokens": 160, **g}, "return_logprob": True}
              for i, g in enumerate([{"regex": "[a-z ]{20,60}\\."}, {"json_schema": json.dumps(PERSON)}, {"json_schema": json.dumps(NODE)}, {}, {"regex": "\\d+"}])]

    def pick(r):
        return r["output_ids"], r["meta_info"]["output_token_logprobs"], r["text"]
    with Server(FINAL) as s:
        want = [pick(s.post("/generate", b)[1]) for b in bodies]
        assert [s.stream("/generate", b)[-1]["text"] for b in bodies] == [w[2] for w in want]
    with Server(FINAL, "--retract-every", "3", "--chunked-prefill-size", "16") as s:
        got = [None] * (2 * len(bodies))

        def ask(i):
            got[i] = pick(s.post("/generate", bodies[i % len(bodies)])[1])
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(got))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert got == want + want
        assert s.get("/server_info")[0] == 200


BAD = [  # sampling parameters of /generate, what the message names
    ({"regex": "a\\1"}, "back reference"), ({"regex": "(?=a)"}, "group"), ({"regex": 5}, "regex"), ({"regex": "(((a{1000}){1000}){1000})"}, "too large"),
    ({"json_schema": "{"}, "json_schema"), ({"json_schema": "{\"not\": {}}"}, "\"not\""), ({"json_schema": "{\"type\": \"x\"}"}, "type"),
    ({"json_schema": {"uniqueItems": True}}, "uniqueItems"), ({"regex": "a", "json_schema": "{}"}, "only one"), ({"ebnf": "root ::= \"a\""}, "ebnf"),
    ({"structural_tag": "{}"}, "structural_tag"), ({"regex": "\ud800"}, ""), ({"json_schema": "false"}, "object or true"),
    # legal, but no token can go on
    ({"regex": "ab", "min_new_tokens": 30, "max_new_tokens": 40}, "no token"), ({"regex": "\\x01\\x02", "logit_bias": {"5": 1}}, None),
]


def test_grammar_refusals():
    with Server(FINAL) as s:
        for sp, named in BAD:
            status, r = s.post("/generate", {"text": "x", "sampling_params": sp})
            if named is not None:
                assert status == 400 and named in r["error"]["message"], (sp, status, r)
        for f, named in (({"type": "grammar"}, "response_format"), ({"type": "json_schema"}, "schema"), ("json_object", "response_format"), ({}, "response_format"),
                         ({"type": "json_schema", "json_schema": {"schema": {"if": {}}}}, "\"if\"")):
            for path, b in (("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}), ("/v1/completions", {"prompt": "x"})):
                status, r = s.post(path, {**b, "response_format": f})
                assert status == 400 and named in r["message"], (f, status, r)
        # a stream says so too, and neighbours go on
        status, data = s.post("/generate", {"text": "x", "stream": True, "sampling_params": {"regex": "ab", "min_new_tokens": 9}}, raw=True)
        assert b"no token" in data, (status, data)
        assert s.generate("x", 4)["meta_info"]["completion_tokens"] == 4
        s.idle()
