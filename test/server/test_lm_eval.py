"""lm-eval's local-completions (loglikelihood with echo) against transformers' float32 numbers of the same model.

test/data/final.reference.json was written by transformers; the rows are its prompts, cut into context
and continuation where that is a token border.  bench/lm_eval_local.py runs the same rows as a task of lm-eval's evaluator,
which needs pandas, scipy, pyarrow and more.
"""
import json

from harness import FINAL, Server


def rows(tokenizer):
    """{id, ctx, cont, n: tokens of cont, want: the sum of transformers' logprobs of them}"""
    out = []
    for i, r in enumerate(json.load(open("test/data/final.reference.json"))["references_float32"]):
        ids = r["input_ids"]
        for cut in range(len(ids) // 2, len(ids) - 1):
            a, b = (tokenizer.decode(x, skip_special_tokens=False) for x in (ids[:cut], ids[cut:]))
            enc = [tokenizer.encode(t, add_special_tokens=False).ids for t in (a, a + b)]
            if enc == [ids[:cut], ids] and not a.endswith(" "):
                out.append({"id": i, "ctx": a, "cont": b, "n": len(ids) - cut, "want": sum(r["prompt_logprobs"][cut - 1:])})
                break
    return out


class Tokenizer:
    """What lm-eval asks of transformers' tokenizers, without transformers."""

    def __init__(self, tokenizer, end):
        self.tokenizer, self.eos_token_id, self.bos_token_id = tokenizer, end, None

    def __call__(self, text, add_special_tokens=False, **_):
        many = [self.tokenizer.encode(t, add_special_tokens=add_special_tokens).ids for t in ([text] if isinstance(text, str) else text)]
        return type("Encoding", (), {"input_ids": many[0] if isinstance(text, str) else many})


def test_lm_eval():
    try:
        from lm_eval.api.instance import Instance
        from lm_eval.models.openai_completions import LocalCompletionsAPI
        from tokenizers import Tokenizer as Fast
    except ImportError as e:
        print(f"skip test_lm_eval: {e} (test/requirements.txt, test/requirements-alone.txt)")
        return
    fast = Fast.from_file(FINAL + "/tokenizer.json")
    data = rows(fast)
    with Server(FINAL) as s:
        lm = LocalCompletionsAPI(model="tiny", base_url=f"http://127.0.0.1:{s.port}/v1/completions", tokenizer_backend=None, batch_size=4,
                                 num_concurrent=2, max_length=4096, max_retries=1)
        lm.tokenizer, lm.tokenizer_backend, lm.tokenized_requests = Tokenizer(fast, fast.token_to_id("<|endoftext|>")), "huggingface", True
        asked = [Instance("loglikelihood", {}, (r["ctx"], r["cont"]), 0) for r in data]
        got = lm.loglikelihood(asked)
    assert len(got) == len(data) >= 17
    off = [abs(float(lp) - r["want"]) / r["n"] for (lp, _), r in zip(got, data)]
    tokens = sum(r["n"] for r in data)
    mean = sum(d * r["n"] for d, r in zip(off, data)) / tokens
    print(f"  lm-eval against transformers: {len(data)} rows, {tokens} tokens, mean difference {mean:.5f} a token, worst row {max(off):.5f}")
    assert mean < 0.001 and max(off) < 0.02, off  # the server's arithmetic is BF16, the reference float32
    assert any(greedy for _, greedy in got) and not all(greedy for _, greedy in got)
    assert tokens > 2000
