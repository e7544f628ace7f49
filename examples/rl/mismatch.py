"""How far Moult's log-probabilities are from the trainer's, by the format of the rollouts and routing replay.

    python3 examples/rl/mismatch.py [--model DIR] [--formats bf16,nvfp4,mxfp8]

The trainer's side is float32 on the BF16 weights.  With replay it takes the experts that the server chose.
"""
import argparse
import os

import torch

from model import Model
from rollout import PROMPT, Server
from train import ROOT, Stream, mismatch


def main():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--moult", default=os.path.join(ROOT, "build/moult"))
    p.add_argument("--model", default=os.path.join(ROOT, "models/tiny-moe-early"))
    p.add_argument("--formats", default="bf16,nvfp4,mxfp8")
    p.add_argument("--prompts", type=int, default=32)
    p.add_argument("--group", type=int, default=4)
    p.add_argument("--threads", type=int, default=2)
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    model = Model.load(o.model)
    shape = (-1, model.c["num_hidden_layers"], model.c["num_experts_per_tok"])
    texts = [PROMPT.format(x["question"]) for x in Stream(0, ()).take(o.prompts)]
    print("rollouts   replay   tokens     mean |d|     max |d|   KL (k3)   same experts")
    for fmt in o.formats.split(","):
        flags = [] if fmt == "bf16" else ["--quantization", fmt]
        server = Server(o.moult, o.model, "--threads", str(o.threads), "--enable-return-routed-experts", *flags)
        try:
            samples = [s for g in server.sample(server.ids(texts), o.group, 160, 1, True) for s in g]
        finally:
            server.stop()
        told = torch.tensor([x for s in samples for x in s.logprobs])
        routes = [s.routes.reshape(shape) for s in samples]
        for replay in (False, True):
            own, seen = [], []
            with torch.no_grad():
                for i in range(0, len(samples), 64):
                    some = samples[i:i + 64]
                    own.append(model.logprobs([s.ids for s in some], [len(s.prompt) for s in some],
                                              routes[i:i + 64] if replay else None, seen))
            same = (torch.cat(seen).sort(-1)[0] == torch.cat([torch.as_tensor(r) for r in routes]).sort(-1)[0])
            m = mismatch(torch.cat(own), told)
            print(f"{fmt:10} {'yes' if replay else 'no':6} {len(told):8} {m['mean']:12.2e} {m['max']:11.2e} "
                  f"{m['kl']:9.2e} {100 * same.all(-1).float().mean():11.2f}%", flush=True)


if __name__ == "__main__":
    main()
