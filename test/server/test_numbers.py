"""Small random models against a forward in float64; logprobs as JSON (C41)."""
import math
import random
import tempfile

import checkpoint
from harness import MOULT, Server

# Rounded to BF16, a near tie of two experts may flip; the build without rounding (make REF=1) has no excuse.
LIMIT = 1e-5 if "/ref/" in MOULT else 0.06
VOCAB = 96  # below the most top logprobs there are, so that a row can be asked for whole


def random_model(path, seed, **k):
    """Writes a folder; gives the config and the tensors as the server rounds them, in float64."""
    import numpy as np
    c = checkpoint.config(VOCAB, 64, num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2,
                          intermediate_size=96, moe_intermediate_size=48, eos_token_id=1, **k)
    rng, tensors, arrays = np.random.default_rng(seed), {}, {}
    for name, shape in checkpoint.shapes(c).items():
        a = rng.standard_normal(shape)
        a = a * (1.5 / math.sqrt(shape[1])) if len(shape) > 1 else 1 + 0.1 * a
        bits = a.astype("<f4").view("<u4")
        bits = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")
        tensors[name] = (shape, bits.tobytes())
        arrays[name] = (bits.astype("<u4") << 16).view("<f4").astype("f8").reshape(shape)
    checkpoint.write_folder(path, c, tensors, checkpoint.tokenizer())
    return c, arrays


def forward64(c, w, ids, skip_dense=False, forced=None, trace=None):
    """log_softmax of every position, [len(ids)][vocab].  `forced` [token][layer]: experts to take instead of the best;
    `trace` gets (layer, probabilities of the experts)."""
    import numpy as np

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[name]

    def softmax(x):
        e = np.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True)

    def mlp(x, p):
        g = x @ w[p + "gate_proj.weight"].T
        return (g / (1 + np.exp(-g)) * (x @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T
    n, d, nh, nk = len(ids), c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]
    angle = np.arange(n)[:, None] * c["rope_theta"] ** (-np.arange(0, d, 2) / d)
    cos, sin = np.cos(np.concatenate([angle, angle], 1)), np.sin(np.concatenate([angle, angle], 1))

    def rope(x):  # [n, heads, d]
        half = np.concatenate([-x[..., d // 2:], x[..., :d // 2]], -1)
        return x * cos[:, None] + half * sin[:, None]
    x = w["model.embed_tokens.weight"][ids]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        h = norm(x, p + "input_layernorm.weight")
        q, k, v = ((h @ w[p + f"self_attn.{m}_proj.weight"].T).reshape(n, -1, d) for m in "qkv")
        q, k = rope(norm(q, p + "self_attn.q_norm.weight")), rope(norm(k, p + "self_attn.k_norm.weight"))
        o = np.zeros((n, nh, d))
        for a in range(nh):
            s = q[:, a] @ k[:, a * nk // nh].T / math.sqrt(d)
            s[np.triu_indices(n, 1)] = -np.inf
            o[:, a] = softmax(s) @ v[:, a * nk // nh]
        x = x + o.reshape(n, -1) @ w[p + "self_attn.o_proj.weight"].T
        h = norm(x, p + "post_attention_layernorm.weight")
        if p + "mlp.gate.weight" not in w:
            x = x + (0 if skip_dense else mlp(h, p + "mlp."))
            continue
        r = softmax(h @ w[p + "mlp.gate.weight"].T)
        if trace is not None:
            trace.append((i, r))
        for t in range(n):
            top = forced[t][i] if forced is not None else np.argsort(-r[t], kind="stable")[:c["num_experts_per_tok"]]
            x[t] += sum(r[t, e] / r[t, top].sum() * mlp(h[t], p + f"mlp.experts.{e}.") for e in top)
    x = norm(x, "model.norm.weight")
    y = x @ w["lm_head.weight"].T
    return y - y.max(-1, keepdims=True) - np.log(np.exp(y - y.max(-1, keepdims=True)).sum(-1, keepdims=True))


def no_numpy(test):
    try:
        import numpy  # noqa: F401
        return False
    except ImportError:
        print(f"skip {test}: numpy is not installed")
        return True


def test_dense_layers():
    """mlp_only_layers and decoder_sparse_step end to end: every logprob of a prompt against float64."""
    if no_numpy("test_dense_layers"):
        return
    rng = random.Random(5)
    for k in (dict(num_hidden_layers=3, mlp_only_layers=[1]), dict(num_hidden_layers=4, decoder_sparse_step=2),
              dict(num_hidden_layers=4, decoder_sparse_step=2, mlp_only_layers=[3]), dict(num_hidden_layers=2)):
        with tempfile.TemporaryDirectory() as d:
            c, w = random_model(d, 3, **k)
            dense = [i for i in range(c["num_hidden_layers"]) if f"model.layers.{i}.mlp.gate.weight" not in w]
            with Server(d) as s:
                off, rough = [], []
                for _ in range(6):
                    ids = [rng.randrange(2, VOCAB) for _ in range(40)]
                    want = forward64(c, w, ids)
                    other = forward64(c, w, ids, skip_dense=True)
                    m = s.generate(ids, 0, logprob_start_len=0, top_logprobs_num=VOCAB)["meta_info"]
                    for t, row in enumerate(m["input_top_logprobs"][1:]):
                        off += [abs(lp - want[t, i]) for lp, i, _ in row]
                        rough += [abs(lp - other[t, i]) for lp, i, _ in row]
                mean = sum(off) / len(off)
                print(f"  dense layers {dense}: mean difference {mean:.2g}, without them {sum(rough) / len(rough):.2g}")
                assert len(off) == 6 * 39 * VOCAB and mean < LIMIT, mean
                assert not dense or sum(rough) / len(rough) > 20 * mean


def test_bias_against_float64():
    """C37: a bias is added to the logits of float64, whatever its size."""
    if no_numpy("test_bias_against_float64"):
        return
    import numpy as np
    with tempfile.TemporaryDirectory() as d:
        c, w = random_model(d, 7)
        rng = random.Random(37)
        with Server(d) as s:
            for size in (0.5, 5, 100):
                ids = [rng.randrange(2, VOCAB) for _ in range(12)]
                bias = {i: rng.uniform(-size, size) for i in range(0, VOCAB, 3)}
                r = s.generate(ids, 1, logit_bias={str(i): v for i, v in bias.items()}, top_logprobs_num=VOCAB)
                y = forward64(c, w, ids)[-1]
                for i, v in bias.items():
                    y[i] += v
                y = y - y.max() - np.log(np.exp(y - y.max()).sum())
                off = [abs(lp - y[i]) for lp, i, _ in r["meta_info"]["output_top_logprobs"][0]]
                assert len(off) == VOCAB and sum(off) / VOCAB < 5 * LIMIT, (size, sum(off) / VOCAB)


def full_rows(r, where="output"):
    return r["meta_info"][f"{where}_top_logprobs"]


def test_logprobs_are_probabilities():
    """C41: whole rows sum to 1; impossible tokens have a finite floor; the first prompt token has none."""
    if no_numpy("test_logprobs_are_probabilities"):
        return
    with tempfile.TemporaryDirectory() as d:
        random_model(d, 11)
        with Server(d) as s:
            ask = dict(top_logprobs_num=VOCAB, logprob_start_len=0, ignore_eos=True)
            bans = {str(i): -100 for i in range(VOCAB) if i != 7}
            rows = 0
            for sp in (dict(), dict(temperature=0.7), dict(temperature=2.5, top_p=0.5), dict(temperature=1, top_k=1),
                       dict(temperature=1, logit_bias=bans), dict(temperature=1, logit_bias={"3": -1e30, "4": 1e30}),
                       dict(logit_bias={str(i): -1e30 for i in range(VOCAB)}), dict(temperature=1e-5), dict(temperature=1e30),
                       dict(repetition_penalty=1.5, frequency_penalty=2, presence_penalty=-2),
                       dict(min_new_tokens=6, stop_token_ids=list(range(2, 60)))):
                r = s.generate([5, 6, 7, 8], 6, **ask, **sp)  # harness.strict reads it
                assert full_rows(r, "input")[0] is None and r["meta_info"]["input_token_logprobs"][0][0] is None
                assert r["meta_info"]["input_token_logprobs"][0][1] == 5
                for row in full_rows(r, "input")[1:] + full_rows(r):
                    assert len(row) == VOCAB and all(math.isfinite(x[0]) for x in row)
                    assert abs(sum(math.exp(x[0]) for x in row) - 1) < 1e-3, (sp, row[:3])
                    rows += 1
                for own, row in zip(r["meta_info"]["output_token_logprobs"], full_rows(r)):
                    assert own[:2] in [x[:2] for x in row]
            assert rows == 11 * (3 + 6)
            for body in ({"echo": True, "logprobs": 5, "top_k": 1}, {"logprobs": 0},
                         {"echo": True, "logprobs": 1, "logit_bias": bans}):
                body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, **body}
                lp = s.post("/v1/completions", body)[1]["choices"][0]["logprobs"]
                if "echo" in body:
                    assert lp["token_logprobs"][0] is None and lp["top_logprobs"][0] is None and len(lp["tokens"]) == 6
                assert all(x is None or math.isfinite(x) for x in lp["token_logprobs"])
                s.stream("/v1/completions", body)
