"""/generate field by field, /tokenize, /detokenize, /v1/loads, and the routes that are refused."""
import base64
import math
import re
import struct
import tempfile
import threading
import time

from harness import EARLY, FINAL, SLOW, Server, strict
from test_numbers import VOCAB, no_numpy, random_model

IDS = [2046, 375, 198, 32, 430]
SP = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}

# field, values that change nothing, values that are refused with words of the message
FIELDS = [
    ("log_metrics", [True, False, None], [(5, "true or false")]),
    ("no_logs", [True, None], [("x", "true or false")]),
    ("routing_key", ["k", None], [(5, "a string")]),
    ("conversation_id", ["c", None], [([], "a string")]),
    ("custom_labels", [{"team": "a"}, None], [("x", "an object")]),
    ("modalities", [["image"], None], [("image", "a list")]),
    ("image_data", [None, [], [None]], [("http://x/y.png", "only text"), (["a"], "only text")]),
    ("video_data", [None], [(["a"], "only text")]),
    ("audio_data", [None], [(["a"], "only text")]),
    ("input_embeds", [None], [([[0.5]], "text or input_ids")]),
    ("lora_path", [None, "", [None]], [("a", "adapters")]),
    ("custom_logit_processor", [None, ""], [("x", "Python")]),
    ("session_id", [None], [("s", "sessions")]),
    ("session_params", [None, {}], [({"id": "s"}, "sessions")]),
    ("return_hidden_states", [False, None, [False]], [(True, "hidden states")]),
    ("return_indexer_topk", [False, None], [(True, "indexer")]),
    ("return_sampling_mask", [None, False], [(True, "return_top_p_token_ids")]),
    ("return_entropy", [False, None], [(True, "entropies")]),
    ("bootstrap_host", [None], [("h", "one server")]),
    ("bootstrap_port", [None], [(99, "one server")]),
    ("bootstrap_room", [None], [(99, "one server")]),
    ("routed_dp_rank", [None, 0], [(1, "one rank")]),
    ("disagg_prefill_dp_rank", [None, 0], [(1, "one rank")]),
    ("some_field_of_tomorrow", [None, 5, {"a": []}], []),
    ("priority", [None, 0, -3, 2 ** 31 - 1], [("x", "an integer"), (2 ** 31, "an integer")]),
    ("extra_key", [None, "", "salt", ["salt"]], [(5, "a string"), (["a", "b"], "2 items for 1 prompts")]),
    ("rid", [None, "r1", ["r2"]], [(5, "a string"), ("", "rid"), ("r" * 200, "rid"), ([5], "a string")]),
    ("return_logprob", [None, False, [False]], [("yes", "true or false"), ([True, True], "2 items for 1")]),
    ("logprob_start_len", [None, -1, 0, [0]], [(-2, "an integer in -1"), (1.5, "an integer"), ([0, 0], "2 items for 1")]),
    ("top_logprobs_num", [None, 0, 128], [(129, "0..128"), (-1, "0..128"), ([1, 2], "2 items for 1")]),
    ("token_ids_logprob", [None, [], [5, 5], [[7]]], [(5, "a list"), (["a"], "token_ids_logprob[0]"), ([2048], "0..2047"),
                                                      ([[1], [2]], "2 items for 1"), ([1] * 4097, "at most 4096")]),
    ("return_text_in_logprobs", [None, True], [(1, "true or false")]),
    ("return_prompt_token_ids", [None, False], [(1, "true or false")]),
    ("return_routed_experts", [None, True, [True]], [(1, "true or false")]),
    ("routed_experts_start_len", [None, 0, 5], [(-1, "0.."), (6, "higher than the number of input tokens (5)")]),
    ("stream", [None, False], [(1, "true or false")]),
    ("sampling_params", [SP, [SP]], [(5, "an object"), ([SP, SP], "2 items for 1"), ({"zzz": 1}, "unknown key")]),
]

SAMPLING = [
    ("custom_params", [None, {}, {"anything": 5}, {"return_top_p_token_ids": False}],
     [("x", "an object"), ({"return_top_p_token_ids": 1}, "true or false")]),
    ("stream_interval", [None, 1, 50], [(0, "1.."), ("x", "an integer")]),
    ("spaces_between_special_tokens", [None, True, False], []),
    ("skip_special_tokens", [None, True], [(1, "true or false")]),
    ("no_stop_trim", [None, True], [(1, "true or false")]),
    ("n", [None, 1], [(0, "1..128"), (129, "1..128")]),
    ("stop", [None, [], "never said"], [([5], "not empty")]),
    ("stop_token_ids", [None, [], [None]], [([2048], "0..2047")]),
    ("stop_regex", [None, [], "never said"], [("(", "no pattern")]),
    ("top_p", [None, 0.5], [(0, "(0, 1]")]), ("top_k", [None, -1, 5], [(0, "top_k: 0")]),
    ("min_p", [None, 0.5], [(1.5, "[0, 1]")]), ("sampling_seed", [None, 5], [(-1, "an integer in 0")]),
    ("min_new_tokens", [None, 0, 6], [(7, "0..6")]), ("logit_bias", [None, {}], [([], "an object")]),
    ("lora_path", [None], [("x", "not supported")]),
]


def test_fields():
    """Every field: without effect where it has none, refused by name where its value makes no sense."""
    with Server(FINAL) as s:
        want = s.post("/generate", {"input_ids": IDS, "sampling_params": SP})[1]["output_ids"]
        n = 0
        for table, inside in ((FIELDS, False), (SAMPLING, True)):
            for name, fine, bad in table:
                for value, words in [(v, None) for v in fine] + bad:
                    sp = dict(SP, **{name: value}) if inside else SP
                    body = {"input_ids": IDS, "sampling_params": sp, **({} if inside else {name: value})}
                    status, r = s.post("/generate", body)
                    n += 1
                    if words is None:
                        assert status == 200 and r["output_ids"] == want, (name, value, r)
                    else:
                        assert status == 400 and words in r["error"]["message"], (name, value, r)
                        assert name in r["error"]["message"] or name in ("sampling_params", "custom_params"), (name, value, r)
        assert n > 150, n
        all_three = {"text": "a", "input_ids": IDS, "input_embeds": [[1.0]]}
        assert s.post("/generate", all_three)[0] == 400
        both = s.post("/generate", {"text": "not this", "input_ids": IDS, "sampling_params": SP})[1]
        assert both["output_ids"] == want


def test_lists_of_a_batch():
    """A list has one item for each prompt; one string is a prefix of ids."""
    prompts = [IDS, [5, 6, 7], [32] * 40]
    with Server(FINAL) as s:
        got = s.post("/generate", {
            "input_ids": prompts, "rid": "job", "return_logprob": [True, False, True], "top_logprobs_num": [2, 0, 3],
            "logprob_start_len": [0, -1, 38], "token_ids_logprob": [[5], None, [6, 7]], "return_prompt_token_ids": True,
            "sampling_params": [dict(SP, max_new_tokens=k) for k in (2, 3, 4)], "extra_key": ["a", None, "b"]})[1]
        assert [r["meta_info"]["id"] for r in got] == ["job_0", "job_1", "job_2"]
        assert [r["prompt_token_ids"] for r in got] == prompts
        assert [r["meta_info"]["completion_tokens"] for r in got] == [2, 3, 4]
        a, b, c = (r["meta_info"] for r in got)
        assert len(a["input_token_logprobs"]) == 5 and len(c["input_token_logprobs"]) == 2
        assert not [k for k in b if "logprobs" in k]
        assert a["output_token_logprobs_length"] == 2 and [len(t) for t in c["output_top_logprobs"]] == [3] * 4
        assert [[x[1] for x in row] for row in c["output_token_ids_logprobs"]] == [[6, 7]] * 4
        assert a["input_token_ids_logprobs"][0] is None and [r[0][1] for r in a["input_token_ids_logprobs"][1:]] == [5] * 4
        same = s.post("/generate", {"input_ids": prompts, "return_logprob": True, "token_ids_logprob": [5, 9],
                                    "rid": ["x", "y", "z"], "sampling_params": SP})[1]
        assert [r["meta_info"]["id"] for r in same] == ["x", "y", "z"]
        assert all([x[1] for x in row] == [5, 9] for r in same for row in r["meta_info"]["output_token_ids_logprobs"])
        for name, value, words in (("rid", ["x", "y", "x"], "Duplicate request ID detected: x"),
                                   ("rid", ["x"], "rid"), ("return_logprob", [True], "1 items for 3 prompts"),
                                   ("extra_key", ["a"] * 4, "4 items for 3"), ("sampling_params", [SP], "1 items for 3"),
                                   ("token_ids_logprob", [[1], [2]], "2 items for 3"),
                                   ("sampling_params", [dict(SP, n=k) for k in (1, 2, 1)], "share n")):
            status, r = s.post("/generate", {"input_ids": prompts, "sampling_params": SP, name: value})
            assert status == 400 and words in r["error"]["message"], (name, value, r)
        # an id that is in flight is refused, and free again once its request has ended
        t = threading.Thread(target=s.generate, args=(IDS, 3000), kwargs=dict(rid="busy", ignore_eos=True))
        t.start()
        while not s.loads()["num_running_reqs"]:
            time.sleep(0.01)
        status, r = s.post("/generate", {"input_ids": IDS, "rid": "busy"})
        assert status == 400 and r["error"]["message"] == "Duplicate request ID detected: busy", r
        s.post("/abort_request", {"rid": "busy"})
        t.join()
        assert s.generate(IDS, 1, rid="busy")["meta_info"]["id"] == "busy"
        # what a client reads of each kind of error, whichever it knows
        status, r = s.post("/generate", {"input_ids": [5000]})
        assert (r["error"]["message"], r["object"], r["code"], r["param"]) == (r["message"], "error", 400, None)
        assert r["error"]["code"] == 400 and r["error"]["retryable"] is False
        assert (r["type"], r["error"]["type"], r["error"]["param"]) == ("BadRequestError", "invalid_request_error", "input_ids[0]"), r
        assert s.get("/none")[1]["type"] == "NotFoundError" and s.get("/none")[1]["error"]["param"] is None
        frame = s.stream("/generate", {"input_ids": IDS, "sampling_params": {"regex": "[ab]{3}", "min_new_tokens": 9}})[-1]
        assert set(frame) == {"error"} and frame["error"]["type"] == "invalid_request_error" and frame["error"]["code"] == 400, frame


def test_logprobs_of_given_ids():
    """token_ids_logprob against whole rows, drawn and scored, at another temperature, in a stream."""
    if no_numpy("test_logprobs_of_given_ids"):
        return
    with tempfile.TemporaryDirectory() as d:
        random_model(d, 17)
        with Server(d) as s:
            of = [3, 95, 3, 0]
            for sp in (SP, dict(SP, max_new_tokens=40), dict(SP, temperature=0.6, top_k=4, sampling_seed=3), dict(SP, max_new_tokens=0)):
                body = {"input_ids": [5, 6, 7, 8], "return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": VOCAB,
                        "token_ids_logprob": of, "return_text_in_logprobs": True, "sampling_params": sp}
                r = s.post("/generate", body)[1]
                m = r["meta_info"]
                for kind in ("input", "output"):
                    for row, given in zip(m[f"{kind}_top_logprobs"], m[f"{kind}_token_ids_logprobs"], strict=True):
                        full = {x[1]: x for x in row or []}
                        assert given == (row and [full[i] for i in of]), (kind, given)
                assert len(m["input_token_ids_logprobs"]) == 3 and m["input_token_ids_logprobs"][0] is None
                assert len(m["output_token_ids_logprobs"]) == sp["max_new_tokens"]
                last = s.stream("/generate", body)[-1]["meta_info"]
                assert last["output_token_ids_logprobs"] == m["output_token_ids_logprobs"]
                del body["return_logprob"]
                assert not [k for k in s.post("/generate", body)[1]["meta_info"] if "logprobs" in k]


def int32s(text):
    data = base64.b64decode(text, validate=True)
    return list(struct.unpack(f"<{len(data) // 4}i", data))


def test_ids_that_top_p_keeps():
    """custom_params.return_top_p_token_ids: the sets, and logprobs over them, from whole rows of logprobs."""
    if no_numpy("test_ids_that_top_p_keeps"):
        return
    with tempfile.TemporaryDirectory() as d:
        random_model(d, 19)
        with Server(d) as s:
            sizes = set()
            for sp in (dict(top_p=0.9), dict(top_p=0.5, temperature=1.7), dict(top_p=1.0, top_k=7), dict(min_p=0.05),
                       dict(top_p=0.95, top_k=20, min_p=0.01), dict(temperature=0), dict(top_p=1e-6)):
                sp = dict({"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 8}, **sp)
                plain = {"input_ids": [5, 6, 7], "return_logprob": True, "top_logprobs_num": VOCAB, "sampling_params": sp}
                body = dict(plain, sampling_params=dict(sp, custom_params={"return_top_p_token_ids": True}))
                a, r = s.post("/generate", plain)[1], s.post("/generate", body)[1]
                assert a["output_ids"] == r["output_ids"] and "top_p_token_ids" not in a["meta_info"]
                m = r["meta_info"]
                ids, ends = int32s(m["top_p_token_ids"]), int32s(m["top_p_token_offsets"])
                assert len(ends) == 41 and ends[0] == 0 and ends[-1] == len(ids) and ends == sorted(ends)
                assert m["output_top_logprobs"] == a["meta_info"]["output_top_logprobs"]
                for k, row in enumerate(m["output_top_logprobs"]):
                    kept, before, want = ids[ends[k]:ends[k + 1]], 0.0, []
                    greedy = sp["temperature"] == 0
                    for rank, (lp, i, _) in enumerate(row):
                        p = math.exp(lp)
                        if rank and (greedy or before > sp.get("top_p", 1) + 1e-6 or rank >= sp.get("top_k", VOCAB) or
                                     p < sp.get("min_p", 0) * math.exp(row[0][0]) - 1e-7):
                            break
                        before += p
                        want.append(i)
                    assert kept == want, (sp, k, kept, want)
                    own = m["output_token_logprobs"][k]
                    full = {x[1]: x[0] for x in row}
                    assert own[1] in kept
                    over = full[own[1]] - math.log(sum(math.exp(full[i]) for i in kept))
                    assert abs(own[0] - over) < 1e-4, (own, over)
                    sizes.add(len(kept))
                frames = s.stream("/generate", body)
                assert frames[-1]["meta_info"]["top_p_token_ids"] == m["top_p_token_ids"]
                assert not any("top_p_token_ids" in f["meta_info"] for f in frames[:-1])
            assert len(sizes) > 5
            none = s.post("/generate", {"input_ids": [5], "sampling_params": {
                "max_new_tokens": 0, "top_p": 0.5, "custom_params": {"return_top_p_token_ids": True}}})[1]["meta_info"]
            assert none["top_p_token_ids"] == "" and int32s(none["top_p_token_offsets"]) == [0]
            status, r = s.post("/generate", {"input_ids": [5], "sampling_params": {
                "custom_params": {"return_top_p_token_ids": True}}})
            assert status == 400 and "top_p" in r["error"]["message"], r


def test_preferred_parameters_and_intervals():
    preferred = '{"temperature": 0, "max_new_tokens": 9, "ignore_eos": true, "stop": ["never said"]}'
    with Server(FINAL, "--preferred-sampling-params", preferred, "--stream-interval", "4") as s:
        assert s.get("/model_info")[1]["preferred_sampling_params"] == strict(preferred)
        r = s.post("/generate", {"input_ids": IDS})[1]
        assert r["meta_info"]["completion_tokens"] == 9
        one = s.post("/generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}})[1]
        assert one["output_ids"] == r["output_ids"][:2]
        for interval, counts in ((None, [1, 5, 9]), (1, list(range(1, 10))), (3, [1, 4, 7, 9]), (100, [1, 9])):
            frames = s.stream("/generate", {"input_ids": IDS, "sampling_params": {"stream_interval": interval}})
            got = [len(f["output_ids"]) for f in frames]
            assert got[-1] == 9 and frames[-1]["output_ids"] == r["output_ids"]
            assert all(b - a >= (interval or 4) for a, b in zip(got, got[1:-1])), (interval, got)
            assert got[0] >= 1 and len(got) <= len(counts), (interval, got)  # steps may be quicker than the reader
    bad = Server(FINAL, "--preferred-sampling-params", "[1]", wait=False)
    assert bad.proc.wait(60) != 0 and "--preferred-sampling-params" in bad.text()


def test_stop_regex():
    """The first token with which Python finds a match; nothing of a match is sent before it is cut off."""
    patterns = [r"\d+", r"[A-Z]\w+ [a-z]+", r"\.\s", r"(?<=4 )dogs?", r"How.*there", r"\bducks\b", r"an(?!d)", r"s\B",
                r"never said", r"(\w)\1", r"[^\x00-\x7f]", r"\n\n", r"\w{9,}"]
    with Server(FINAL) as s, Server(FINAL, "--incremental-streaming-output") as inc:
        prompt = "Question: A farm has 10 ducks and 4 dogs. How many animals are there?\nAnswer:"
        whole = s.generate(prompt, 60, ignore_eos=True)
        ids = whole["output_ids"]
        texts = [s.post("/detokenize", {"tokens": ids[:k]})[1]["text"] for k in range(len(ids) + 1)]
        stopped = 0
        for p in patterns[::3 if SLOW else 1] + [patterns[:3], [patterns[8], patterns[5]]]:
            each = p if isinstance(p, list) else [p]
            hits = [(k, m.start(), x) for k in range(1, 61) for x in each for m in [re.search(x, texts[k])] if m]
            k, at, which = min(hits, default=(60, None, None))
            for keep in (False, True):
                sp = {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True, "stop_regex": p, "no_stop_trim": keep}
                r = s.post("/generate", {"text": prompt, "sampling_params": sp})[1]
                assert r["output_ids"] == ids[:k], (p, len(r["output_ids"]), k)
                want = {"type": "length", "length": 60} if at is None else {"type": "stop", "matched": which}
                assert r["meta_info"]["finish_reason"] == want, (p, r["meta_info"])
                if "\ufffd" not in texts[k]:
                    assert r["text"] == (texts[k] if keep or at is None else texts[k][:at]), (p, r["text"], texts[k])
                frames = inc.stream("/generate", {"text": prompt, "sampling_params": sp})
                assert "".join(f["text"] for f in frames) == r["text"], p
            stopped += at is not None
        assert stopped >= (3 if SLOW else 8), stopped
        both = {"temperature": 0, "max_new_tokens": 60, "stop": ["zzz", "yyy"], "stop_regex": r"\d+", "ignore_eos": True}
        r = s.post("/generate", {"text": prompt, "sampling_params": both})[1]
        assert r["meta_info"]["finish_reason"]["matched"] == r"\d+"
        chat = s.post("/v1/completions", {"prompt": prompt, "max_tokens": 60, "temperature": 0, "stop_regex": r"\d+"})[1]
        assert chat["choices"][0]["finish_reason"] == "stop" and chat["choices"][0]["matched_stop"] == r"\d+"
        for bad, words in (("(", "no pattern"), ("", "1 to"), (5, "a string"), ([5], "a string"), (["a"] * 9, "at most 8"),
                           ("a" * 1001, "1 to")):
            status, r = s.post("/generate", {"input_ids": IDS, "sampling_params": {"stop_regex": bad}})
            assert status == 400 and words in r["error"]["message"], (bad, r)
        cpu = s.cpu()
        status, r = s.post("/generate", {"text": prompt, "sampling_params": dict(
            SP, max_new_tokens=200, stop_regex=r"((\w|\s|.)+)+\x01")})
        assert status == 400 and "given up" in r["error"]["message"] and s.cpu() - cpu < 5, r


def test_tokenize():
    texts = ["Question: 2 + 3?\nAnswer:", "", "héllo 漢字 \U0001f600", "<|im_start|>user"]
    with Server(FINAL) as s:
        for path in ("/tokenize", "/v1/tokenize"):
            whole = s.post(path, {"model": "m", "prompt": texts})[1]
            for t, ids, n in zip(texts, whole["tokens"], whole["count"], strict=True):
                one = s.post(path, {"prompt": t, "add_special_tokens": False})[1]
                assert one["tokens"] == ids and one["count"] == n == len(ids) and one["max_model_len"] == 4096
                if t:
                    m = s.generate(t, 0, logprob_start_len=0)["meta_info"]
                    assert [x[1] for x in m["input_token_logprobs"]] == ids
                    assert s.post("/detokenize", {"tokens": ids, "skip_special_tokens": False})[1] == {"text": t}
        back = s.post("/v1/detokenize", {"tokens": whole["tokens"], "skip_special_tokens": False})[1]["text"]
        assert back == texts
        assert s.post("/detokenize", {"tokens": whole["tokens"][3]})[1]["text"] == "user"
        assert s.post("/detokenize", {"tokens": []})[1] == {"text": ""}
        messages = [{"role": "user", "content": "What is 2 + 3?"}]
        ids = s.post("/tokenize", {"messages": messages})[1]["tokens"]
        chat = s.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})[1]
        assert chat["usage"]["prompt_tokens"] == len(ids)
        again = s.post("/v1/chat/completions", {"input_ids": ids, "max_tokens": 1, "temperature": 0})[1]
        assert again["usage"]["prompt_tokens"] == len(ids)
        for path, body in (("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": messages}), ("/tokenize", {"prompt": 5}),
                           ("/tokenize", {"prompt": [5]}), ("/tokenize", {"prompt": "a", "add_special_tokens": 1}),
                           ("/tokenize", {"messages": []}), ("/detokenize", {}), ("/detokenize", {"tokens": "a"}),
                           ("/detokenize", {"tokens": [2048]}), ("/detokenize", {"tokens": [[5], [-1]]}),
                           ("/detokenize", {"tokens": [[5], 5]}), ("/detokenize", {"tokens": [5], "skip_special_tokens": 0})):
            status, r = s.post(path, body)
            assert status == 400 and len(r["message"]) > 10, (path, body, r)


REFUSED = ["/v1/embeddings", "/v1/classify", "/classify", "/v1/score", "/v1/rerank", "/encode", "/v1/responses",
           "/v1/responses/r1", "/v1/responses/r1/cancel", "/v1/messages", "/v1/messages/count_tokens",
           "/v1/audio/transcriptions", "/v1/realtime", "/api/chat", "/api/generate", "/api/tags", "/api/show", "/invocations",
           "/vertex_generate", "/open_session", "/close_session", "/load_lora_adapter", "/unload_lora_adapter",
           "/load_lora_adapter_from_distributed", "/start_expert_distribution_record", "/stop_expert_distribution_record",
           "/dump_expert_distribution_record", "/hicache/attach", "/freeze_gc", "/slow_down", "/configure_logging",
           "/set_internal_state", "/parse_function_call", "/separate_reasoning", "/parallelism_config"]


def test_loads_and_refused_routes():
    with Server(EARLY, "--max-total-tokens", "8192") as s:
        for path in REFUSED:
            for method, body in (("GET", None), ("POST", {}), ("POST", "no json")):
                status, r = s.request(method, path, body)
                assert status == 400 and len(r["message"]) > 10, (path, r)
            assert "is not served here: " in s.post(path, {})[1]["message"]
        assert s.get("/v1/audio")[0] == s.get("/api/")[0] == s.get("/v1/nothing")[0] == 404
        s.generate([32] * 100, 1)
        s.generate([32] * 100, 1)
        t = threading.Thread(target=s.generate, args=(IDS, 3000), kwargs=dict(rid="long", ignore_eos=True))
        t.start()
        while not s.loads()["num_running_reqs"]:
            time.sleep(0.01)
        whole = s.get("/v1/loads")[1]
        load = whole["loads"][0]
        assert load["num_running_reqs"] == load["num_total_reqs"] == 1 and load["num_used_tokens"] > 0
        assert 0 < load["cache_hit_rate"] < 1 and 0 < load["token_usage"] < 1 and load["utilization"] > 0
        assert set(load) > {"memory", "queues", "max_total_num_tokens", "gen_throughput", "max_running_requests"}
        core = s.get("/v1/loads?include=core&dp_rank=0&format=json")[1]["loads"][0]
        assert set(load) - set(core) == {"memory", "queues"}
        assert set(s.get("/v1/loads?include=core,queues")[1]["loads"][0]) - set(core) == {"queues"}
        status, text = s.get("/v1/loads?format=prometheus", raw=True)
        lines = dict(x.rsplit(" ", 1) for x in text.decode().splitlines())
        assert lines['sglang:num_running_reqs{dp_rank="0"}'] == "1" and len(lines) >= 10
        for bad in ("include=x", "include=core,x", "format=xml", "dp_rank=1"):
            status, r = s.get("/v1/loads?" + bad)
            assert status == 400 and bad.split("=")[0] in r["message"], r
        get = s.get("/get_load")[1]
        assert len(get) == 1 and get[0]["num_reqs"] == 1 and get[0]["dp_rank"] == 0
        s.post("/abort_request", {"abort_all": True})
        t.join()
