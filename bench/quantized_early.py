#!/usr/bin/env python3
"""The early checkpoint quantized to each format: Moult's answers beside float32 on the exactly dequantized weights.

    python3 bench/quantized_early.py [--questions 1209] [--formats nvfp4,mxfp8] [--transformers 16]

For each format: `moult quantize`; an oracle in numpy (test/checkpoint_oracle.py, float64 from the formats'
public definitions) decodes every matrix, rounded once to float32; PyTorch (examples/rl/model.py) answers the
chat zero-shot questions with those weights, greedy, in float32; so does `moult serve` on the quantized folder.
--transformers N lets transformers answer the first N questions too and counts equal answers.
The early checkpoint is right on less than half of the questions: nothing is saturated.  Ends with 1 if an accuracy
differs by more than 2.5 points.
"""
import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "examples/rl"), os.path.join(ROOT, "test"), os.path.join(ROOT, "test/server")]
import numpy as np  # noqa: E402
import torch  # noqa: E402
import checkpoint  # noqa: E402
import checkpoint_oracle as oracle  # noqa: E402
from model import Model  # noqa: E402
from rollout import PROMPT, Server, right  # noqa: E402

FORMATS = "bf16,fp8-block,fp8-tensor,fp8-channel,mxfp8,nvfp4,mxfp4"
POINTS = 2.5


class Words:
    """Text of ids, from tokenizer.json."""

    def __init__(self, folder):
        with open(os.path.join(folder, "tokenizer.json")) as f:
            t = json.load(f)
        back = {c: b for b, c in checkpoint.BYTES.items()}
        self.bytes = {i: bytes(back[c] for c in word) for word, i in t["model"]["vocab"].items()}
        self.bytes.update({a["id"]: a["content"].encode() for a in t["added_tokens"]})

    def text(self, ids):
        return b"".join(self.bytes[i] for i in ids).decode(errors="replace")


def dequantized(folder):
    """{Hugging Face name: float32 tensor}"""
    return {m + ".weight": torch.from_numpy(w.astype(np.float32)) for m, (w, _) in oracle.weights(folder).items()}


def in_batches(model, prompts, most, stops, size=128):
    """Greedy answers, prompts of like lengths together."""
    order, out = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), [None] * len(prompts)
    for i in range(0, len(order), size):
        some = order[i:i + size]
        for j, ids in zip(some, model.greedy([prompts[j] for j in some], most, stops)):
            out[j] = ids
    return out


def by_transformers(folder, tensors, prompts, most, stops):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    with open(os.path.join(folder, "config.json")) as f:
        c = {k: v for k, v in json.load(f).items() if k not in ("quantization_config", "torch_dtype")}
    m = Qwen3MoeForCausalLM(Qwen3MoeConfig(**c)).float().eval()
    with tempfile.TemporaryDirectory() as d:
        # Its own loader joins the experts as it likes.
        from safetensors.torch import save_file
        save_file({k: v.contiguous() for k, v in tensors.items()}, os.path.join(d, "model.safetensors"))
        m.config.save_pretrained(d)
        m = Qwen3MoeForCausalLM.from_pretrained(d, dtype=torch.float32).eval()
    out = []
    for p in prompts:
        ids = m.generate(torch.tensor([p]), do_sample=False, max_new_tokens=most, eos_token_id=sorted(stops),
                         pad_token_id=min(stops))[0, len(p):].tolist()
        out.append([i for i in ids if i not in stops])
    return out


def one(o, fmt, rows, folder):
    r = {"format": fmt, "questions": len(rows)}
    if fmt == "bf16":
        folder = o.model
    else:
        subprocess.run([o.moult, "quantize", o.model, folder, "--format", fmt], check=True, capture_output=True)
    with open(os.path.join(o.model, "generation_config.json")) as f:
        stops = set(json.load(f)["eos_token_id"])
    with open(os.path.join(folder, "config.json")) as f:
        config = json.load(f)
    texts = [PROMPT.format(p["question"]) for p in rows]
    server = Server(o.moult, folder, "--threads", str(o.threads))
    try:
        prompts = server.ids(texts)
        replies = server.ask("POST", "/generate", {"input_ids": prompts, "sampling_params": {
            "temperature": 0, "max_new_tokens": o.most}})
        r["cpu_moult"] = server.cpu()
    finally:
        server.stop()
    moult = [x["text"] for x in replies]
    tensors, t0 = dequantized(folder), sum(os.times()[:2])
    answers = in_batches(Model(config, tensors), prompts, o.most, stops)
    r["cpu_torch"] = sum(os.times()[:2]) - t0
    words = Words(o.model)
    theirs = [words.text(a) for a in answers]
    r["moult"] = 100 * sum(right(t, p["answer"]) for t, p in zip(moult, rows)) / len(rows)
    r["torch"] = 100 * sum(right(t, p["answer"]) for t, p in zip(theirs, rows)) / len(rows)
    r["points"] = r["moult"] - r["torch"]
    r["equal_answers"] = sum(re.sub(r"<\|im_end\|>$", "", a) == b for a, b in zip(moult, theirs))
    if o.transformers:
        got = by_transformers(folder, tensors, prompts[:o.transformers], o.most, stops)
        r["torch_equals_transformers"] = f"{sum(a == b for a, b in zip(got, answers))} of {len(got)}"
    return r


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--moult", default=os.path.join(ROOT, "build/moult"))
    p.add_argument("--model", default=os.path.join(ROOT, "models/tiny-moe-early"))
    p.add_argument("--formats", default=FORMATS)
    p.add_argument("--questions", type=int, default=1209)
    p.add_argument("--most", type=int, default=256, help="new tokens of an answer")
    p.add_argument("--transformers", type=int, default=0, metavar="N")
    p.add_argument("--threads", type=int, default=2)
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    with open(os.path.join(ROOT, "models/gsm-tiny.jsonl")) as f:
        rows = [json.loads(line) for line in f][8:8 + o.questions]
    bad = 0
    for fmt in o.formats.split(","):
        with tempfile.TemporaryDirectory() as d:
            t = time.time()
            r = one(o, fmt, rows, os.path.join(d, "model"))
            r["wall"] = time.time() - t
            print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in r.items()}), flush=True)
            bad += not math.fabs(r["points"]) <= POINTS
    sys.exit(bad != 0)


if __name__ == "__main__":
    main()
