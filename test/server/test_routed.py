"""Routing replay (C71): which experts each token went to, and prompts that come with them."""
import base64
import random
import struct
import tempfile
import threading

from harness import EARLY, FINAL, MOULT, SLOW, Server
from test_numbers import LIMIT, VOCAB, forward64, no_numpy, random_model

FLAG = "--enable-return-routed-experts"
LAYERS, TOP_K, EXPERTS = 3, 4, 16  # of the models in the repository


def rows(meta, layers=LAYERS, top_k=TOP_K, experts=EXPERTS):
    """[token][layer][choice], checked against the counts beside it."""
    data = base64.b64decode(meta["routed_experts"], validate=True)
    n = max(0, meta["prompt_tokens"] + meta["completion_tokens"] - 1 - meta["routed_experts_start_len"])
    assert len(data) == n * layers * top_k * 4, (len(data), n)
    flat = struct.unpack(f"<{len(data) // 4}i", data)
    assert all(0 <= x < experts for x in flat)
    row = [flat[i:i + top_k] for i in range(0, len(flat), top_k)]
    assert all(len(set(r)) == top_k or not any(r) for r in row)
    return [row[i:i + layers] for i in range(0, len(row), layers)]


def ask(s, ids, max_new=6, start=None, **k):
    sp = {"temperature": 0, "max_new_tokens": max_new, "ignore_eos": True, **k.pop("sp", {})}
    body = {"input_ids": ids, "sampling_params": sp, "return_logprob": True, "return_routed_experts": True, **k}
    if start is not None:
        body["routed_experts_start_len"] = start
    status, r = s.post("/generate", body)
    assert status == 200, r
    return r


def prompt(n, salt=0):
    return [(salt * 37 + i * 11 + i * i % 7) % 2000 for i in range(n)]


def test_routed_experts_cold_and_warm():
    """C71: prompts of 10, 512 and 3,000 tokens (under sanitizers 10 and 100), whole and in pieces, cold and from the cache."""
    want = {}
    for flags in ((), ("--chunked-prefill-size", "64"), ("--disable-radix-cache",), ("--retract-every", "3")):
        with Server(FINAL, FLAG, *flags) as s:
            for n in (10, 100) if SLOW else (10, 512) if flags else (10, 512, 3000):
                for again in range(2):
                    r = ask(s, prompt(n))
                    m = r["meta_info"]
                    if again and n > 16 and flags != ("--disable-radix-cache",):
                        assert m["cached_tokens"] >= n - 32, m["cached_tokens"]
                    if flags == ("--retract-every", "3"):
                        assert m["num_retractions"] > 0
                    text = want.setdefault(n, m["routed_experts"])
                    assert m["routed_experts"] == text, (flags, n, again)
                    whole = rows(m)
                    assert len({tuple(map(tuple, t)) for t in whole}) > 2
                for start in (0, 5, n):
                    m = ask(s, prompt(n), start=start)["meta_info"]
                    assert m["routed_experts_start_len"] == start and rows(m) == whole[start:]
                # scoring alone: no token is drawn, the last one of the prompt has no row
                m = ask(s, prompt(n), 0)["meta_info"]
                assert rows(m) == whole[:n - 1]
                assert rows(ask(s, prompt(n), 0, start=n)["meta_info"]) == []
            status, r = s.post("/generate", {"input_ids": prompt(10), "return_routed_experts": True,
                                             "routed_experts_start_len": 11})
            assert status == 400 and "is higher than the number of input tokens (10)" in r["error"]["message"], r


def test_routed_experts_in_a_crowd():
    """C71: beside others with and without the flag, streamed, two samples, batches, under little KV."""
    with Server(FINAL, FLAG) as s:
        alone = {i: ask(s, prompt(40 + i, i), 60)["meta_info"]["routed_experts"] for i in range(8)}
    with Server(FINAL, FLAG, "--max-total-tokens", "400", "--chunked-prefill-size", "24", "--max-running-requests",
                "12") as s:
        got, plain = {}, []

        def one(i):
            if i % 3 == 2:
                plain.append(s.generate(prompt(30, i), 12))
            elif i % 3 == 1:
                body = {"input_ids": prompt(40 + i % 8, i % 8), "return_routed_experts": True,
                        "sampling_params": {"temperature": 0, "max_new_tokens": 60, "ignore_eos": True}}
                frames = s.stream("/generate", body)
                assert not any("routed_experts" in f["meta_info"] for f in frames[:-1])
                got[i] = frames[-1]["meta_info"]
            else:
                got[i] = ask(s, prompt(40 + i % 8, i % 8), 60)["meta_info"]
        ts = [threading.Thread(target=one, args=(i,)) for i in range(24 if SLOW else 48)]
        for t in ts:
            t.start()
        for t in ts:
            t.join()
        assert len(got) == 2 * len(plain) == len(ts) * 2 // 3
        assert all("routed_experts" not in r["meta_info"] for r in plain)
        for i, m in got.items():
            assert m["routed_experts"] == alone[i % 8], i
        assert any(m["num_retractions"] for m in got.values())
        batch = ask(s, [prompt(40, 0), prompt(41, 1)], 60, return_routed_experts=[True, False])
        assert batch[0]["meta_info"]["routed_experts"] == alone[0]
        assert "routed_experts" not in batch[1]["meta_info"]
        two = ask(s, prompt(20), 8, sp={"n": 2, "temperature": 1.0, "sampling_seed": 5})
        a, b = (rows(r["meta_info"]) for r in two)
        assert a[:20] == b[:20] and two[0]["output_ids"] != two[1]["output_ids"] and a != b


def test_routed_experts_after_aborts():
    """C71: rows for exactly the tokens returned, or no key; without the server's flag there is none."""
    with Server(EARLY) as s:
        assert "routed_experts" not in ask(s, prompt(10))["meta_info"]
    with Server(EARLY, FLAG, "--max-running-requests", "2", "--chunked-prefill-size", "16") as s:
        long = 200 if SLOW else 2000
        full = rows(ask(s, prompt(20), long)["meta_info"])
        out = {}

        def one(i):
            ids = prompt(3000, i) if i % 4 == 3 else prompt(20)
            out[i] = ask(s, ids, long, rid=f"job-{i}")
        ts = [threading.Thread(target=one, args=(i,)) for i in range(8)]
        for t in ts:
            t.start()
        while not s.loads()["num_running_reqs"] or s.get("/server_info")[1]["steps"] < long + 20:
            pass
        while any(t.is_alive() for t in ts):
            s.post("/abort_request", {"rid": "job-"})
        with_rows = 0
        for i, r in out.items():
            m = r["meta_info"]
            assert m["finish_reason"]["type"] == "abort", m
            if "routed_experts" in m:
                with_rows += 1
                assert i % 4 == 3 or rows(m) == full[:19 + m["completion_tokens"]]
            else:
                assert m["completion_tokens"] == 0, m  # still in the queue, or within its prompt
        assert with_rows


def refused(s, given, n=10):
    status, r = s.post("/generate", {"input_ids": prompt(n), "routed_experts": given,
                                     "sampling_params": {"max_new_tokens": 1}})
    assert status == 400, r
    return r["error"]["message"]


def test_replay_of_own_routing():
    """The routing that the model chose, given back, changes no bit; another one does, and stays out of the cache."""
    with Server(FINAL, FLAG) as s:
        ids = prompt(200)
        free = ask(s, ids, 12, logprob_start_len=0)
        m = free["meta_info"]
        text, lists = m["routed_experts"], rows(m)
        whole = base64.b64encode(base64.b64decode(text)[:200 * LAYERS * TOP_K * 4]).decode()
        other = [[[(e + 1) % EXPERTS for e in layer] for layer in token] for token in lists[:200]]
        for _ in range(2):
            for given in (whole, lists[:200], lists[:77], lists[:1], []):
                r = ask(s, ids, 12, logprob_start_len=0, routed_experts=given)
                assert r["output_ids"] == free["output_ids"]
                for name in ("input_token_logprobs", "output_token_logprobs", "routed_experts"):
                    assert r["meta_info"][name] == m[name], name
                assert not given or r["meta_info"]["cached_tokens"] == 0
        forced = ask(s, ids, 12, logprob_start_len=0, routed_experts=other)
        assert rows(forced["meta_info"])[:200] == [[tuple(x) for x in t] for t in other]
        assert forced["meta_info"]["input_token_logprobs"] != m["input_token_logprobs"]
        again = ask(s, ids, 12, logprob_start_len=0)
        assert again["meta_info"]["input_token_logprobs"] == m["input_token_logprobs"]
        assert again["meta_info"]["routed_experts"] == text
        # one item a prompt; a retracted one is forced again
        two = ask(s, [ids, ids], 12, logprob_start_len=0, routed_experts=[other, None])
        assert two[0]["meta_info"]["input_token_logprobs"] == forced["meta_info"]["input_token_logprobs"]
        assert two[1]["meta_info"]["input_token_logprobs"] == m["input_token_logprobs"]
        good = lists[:10]
        for given, words in ((5, "must be base64"), ("AAA", "not base64"), ("AA A", "not base64"),
                             ("AAAA", "3 bytes"), (lists[:11], "11 rows for a prompt of 10 tokens"),
                             (good[:3] + [good[3][:2]], "[3]: must be a list of 3 layers"),
                             (good[:3] + [[[1, 2, 3]] * 3], "[3][0]: must be a list of 4 experts"),
                             (good[:3] + [[[1, 2, 3, 16]] * 3], "[3][0][3]: 16 is not allowed"),
                             (good[:3] + [[[1, 2, 3, -1]] * 3], "[3][0][3]: -1 is not allowed"),
                             (good[:3] + [[[1, 2, 3, 0.5]] * 3], "[3][0]"), ([1, 2], "[0]"),
                             (base64.b64encode(struct.pack("<12i", *[99] * 12)).decode(), "[0][0][0]: 99")):
            assert words in refused(s, given), (given, refused(s, given))
        assert ask(s, prompt(10))["output_ids"]
    with Server(FINAL, FLAG, "--retract-every", "3") as s:
        r = ask(s, ids, 12, logprob_start_len=0, routed_experts=other)
        assert r["meta_info"]["num_retractions"] > 0 and r["meta_info"]["routed_experts"] == forced["meta_info"]["routed_experts"]
        for name in ("input_token_logprobs", "output_token_logprobs"):
            assert r["meta_info"][name] == forced["meta_info"][name]


def test_routing_against_float64():
    """Sets of experts equal those of a forward in float64 but for near ties; forced ones give its logprobs."""
    if no_numpy("test_routing_against_float64"):
        return
    import numpy as np
    rng = random.Random(71)
    for k in (dict(num_hidden_layers=3, mlp_only_layers=[1]), dict(num_hidden_layers=2)):
        with tempfile.TemporaryDirectory() as d:
            c, w = random_model(d, 13, **k)
            layers, top_k, n_experts = c["num_hidden_layers"], c["num_experts_per_tok"], c["num_experts"]
            dense = [i for i in range(layers) if f"model.layers.{i}.mlp.gate.weight" not in w]
            with Server(d, FLAG) as s:
                flips, total, off = 0, 0, []
                for _ in range(4 if SLOW else 10):
                    ids = [rng.randrange(2, VOCAB) for _ in range(40)]
                    got = np.array(rows(ask(s, ids, 1)["meta_info"], layers, top_k, n_experts))
                    # the reference follows the server's choices, so that one flip does not spoil what comes after
                    trace = []
                    want = forward64(c, w, ids, forced=got, trace=trace)
                    for i, r in trace:
                        order = np.sort(-r, 1)
                        mine = np.sort(np.take_along_axis(r, got[:, i], 1), 1)[:, 0]
                        gap = -order[:, top_k - 1] - mine  # how much worse the worst choice is than the k-th best
                        total += len(ids)
                        flips += int((gap > 1e-12).sum())
                        assert gap.max() < (1e-6 if "/ref/" in MOULT else 0.02), gap.max()
                        assert (np.diff(np.take_along_axis(r, got[:, i], 1), axis=1) < 0.02).all()  # best first
                    for i in dense:
                        assert not got[:, i].any()
                    any_ids = np.array([[rng.sample(range(n_experts), top_k) for _ in range(layers)] for _ in ids])
                    for given in (got, any_ids):
                        want = forward64(c, w, ids, forced=given)
                        m = ask(s, ids, 0, logprob_start_len=0, top_logprobs_num=VOCAB,
                                routed_experts=given.tolist())["meta_info"]
                        off += [abs(lp - want[t, i]) for t, row in enumerate(m["input_top_logprobs"][1:])
                                for lp, i, _ in row]
                mean = sum(off) / len(off)
                print(f"  dense {dense}: {flips} near ties of {total}, logprobs under forced experts off by {mean:.2g}")
                assert flips <= total * 0.02 and mean < LIMIT / 2, (flips, total, mean)
