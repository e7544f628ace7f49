#!/usr/bin/env python3
"""lm-eval's local-completions (loglikelihood with echo) against a server of models/tiny-moe, compared with transformers.

usage: lm_eval_local.py MOULT [RESULT]     in a virtual environment with lm-eval, transformers and their needs

The rows of test/server/test_lm_eval.py, as a task of lm-eval's evaluator; the sum of the reference's float32 logprobs of
the continuation is what lm-eval should find.
"""
import json
import os
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, "test/server")
import harness  # noqa: E402
import lm_eval  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from test_lm_eval import rows  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

MODEL = "models/tiny-moe"


def main():
    harness.MOULT = sys.argv[1]
    data = rows(Tokenizer.from_file(MODEL + "/tokenizer.json"))
    with tempfile.TemporaryDirectory() as d, harness.Server(MODEL) as s:
        with open(d + "/rows.jsonl", "w") as f:
            f.writelines(json.dumps(r) + "\n" for r in data)
        with open(d + "/tiny.yaml", "w") as f:
            f.write(f"task: tiny\ndataset_path: json\ndataset_kwargs:\n  data_files: {d}/rows.jsonl\noutput_type: loglikelihood\n"
                    "test_split: train\ndoc_to_text: '{{ctx}}'\ndoc_to_target: '{{cont}}'\ntarget_delimiter: ''\n"
                    "metric_list:\n  - metric: perplexity\n  - metric: acc\n")
        args = f"model=tiny,base_url=http://127.0.0.1:{s.port}/v1/completions,tokenizer={os.path.abspath(MODEL)},tokenizer_backend=huggingface,num_concurrent=2,max_length=4096"
        out = lm_eval.simple_evaluate(model="local-completions", model_args=args, tasks=["tiny"], batch_size=4, log_samples=True, bootstrap_iters=0,
                                      task_manager=TaskManager(include_path=d, include_defaults=False))
    worst = total = tokens = 0
    for x in out["samples"]["tiny"]:
        got, greedy = x["filtered_resps"][0] if isinstance(x["filtered_resps"][0], (list, tuple)) else x["filtered_resps"]
        want, n = x["doc"]["want"], x["doc"]["n"]
        worst, total, tokens = max(worst, abs(got - want) / n), total + abs(got - want), tokens + n
        print(f"row {x['doc']['id']:2}: {n:3} tokens, lm-eval {float(got):10.5f}, transformers {want:10.5f}, greedy {greedy}")
    print(f"{len(out['samples']['tiny'])} rows, {tokens} tokens: mean difference {total / tokens:.5f} a token, worst row {worst:.5f} a token")
    return len(out["samples"]["tiny"]) != len(data) or total / tokens > 0.02


if __name__ == "__main__":
    sys.exit(main())
