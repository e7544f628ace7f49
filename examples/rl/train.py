"""Group-relative policy gradient on word problems, rollouts by Moult, weights replaced while it serves.

    python3 examples/rl/train.py --out /tmp/rl          # README.md says what comes out

A step: the server samples `--group` answers to each of `--prompts` problems; a right
answer earns 1; its advantage is the reward less the group's mean, over the group's deviation.  Groups
that are all right or all wrong say nothing and are left out.  The objective is PPO's clipped one on the
ratio of the trainer's probability to the one that the server reported, so that it also corrects for
how the two differ.  After `--minibatches` optimizer steps the weights are written as BF16 and the server
loads them in place, under the next weight version.

Mismatch is taken on the first minibatch, when both sides hold the same weights.
"""
import argparse
import copy
import json
import os
import random
import shutil
import sys
import time

import torch

import problems
from model import Model
from rollout import PROMPT, Client, Server, right

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def options():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--out", required=True, help="folder for log.jsonl and the checkpoints")
    p.add_argument("--url", help="a running server of --model; without it one is started")
    p.add_argument("--moult", default=os.path.join(ROOT, "build/moult"), help="the program to start")
    p.add_argument("--quantization", help="of the rollouts, for the server that is started: nvfp4, mxfp8, ...")
    p.add_argument("--model", default=os.path.join(ROOT, "models/tiny-moe-early"))
    p.add_argument("--held-out", default=os.path.join(ROOT, "models/gsm-tiny.jsonl"))
    p.add_argument("--steps", type=int, default=100)
    p.add_argument("--prompts", type=int, default=32, help="problems a step")
    p.add_argument("--group", type=int, default=8, help="answers to a problem")
    p.add_argument("--minibatches", type=int, default=4, help="optimizer steps a step")
    p.add_argument("--most", type=int, default=160, help="new tokens of an answer")
    p.add_argument("--temperature", type=float, default=0.8, help="of the answers, in both programs")
    p.add_argument("--lr", type=float, default=6e-5)
    p.add_argument("--beta2", type=float, default=0.95, help="Adam's, of the squared gradients")
    p.add_argument("--frozen", nargs="*", default=["embed", "head", "gate"], metavar="NAME",
                   help="parameters that stay")
    p.add_argument("--warmup", type=int, default=8, help="optimizer steps until the learning rate is whole")
    p.add_argument("--clip", type=float, nargs=2, default=(0.2, 0.28), help="below and above 1")
    p.add_argument("--average", type=float, default=0.98, help="decay an optimizer step of the average that is evaluated")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--eval-every", type=int, default=20, help="steps; also before the first and after the last")
    p.add_argument("--questions", type=int, default=1209, help="held-out questions of an evaluation")
    p.add_argument("--target", type=float, help="stop after an evaluation that reaches this accuracy")
    p.add_argument("--replay", choices=("off", "report", "train"), default="off",
                   help="routing replay: report the mismatch with it too, or also train with it")
    p.add_argument("--threads", type=int, default=2, help="of the trainer, and of the server that is started")
    return p.parse_args()


def held_out(path):
    """The rows after the 8 that serve as shots elsewhere."""
    with open(path) as f:
        return [json.loads(line) for line in f][8:]


class Stream:
    """Problems without end, none of them in `exclude`, none twice."""

    def __init__(self, seed, exclude):
        self.random, self.seen = random.Random(7_000_000 + seed), set(exclude)

    def take(self, n):
        out = []
        while len(out) < n:
            p = problems.problem(self.random)
            if p["question"] not in self.seen:
                self.seen.add(p["question"])
                out.append(p)
        return out


def mismatch(trainer, server):
    """What the two say of the same tokens: mean and largest |difference|, and KL(server || trainer) by k3."""
    d = (trainer - server).double()
    return {"mean": d.abs().mean().item(), "max": d.abs().max().item(), "kl": (d.exp() - 1 - d).mean().item()}


class Trainer:
    def __init__(self, o, client):
        self.o, self.client = o, client
        self.model = Model.load(o.model)
        self.model.rounded = True
        for name, p in self.model.named_parameters():
            p.requires_grad_(not any(word in name.split(".") for word in o.frozen))
        learned = [p for p in self.model.parameters() if p.requires_grad]
        self.adam = torch.optim.Adam(learned, lr=o.lr, betas=(0.9, o.beta2), eps=1e-7)
        self.updates = 0
        self.average = copy.deepcopy(self.model)

    def routes(self, samples):
        c = self.model.c
        shape = (-1, c["num_hidden_layers"], c["num_experts_per_tok"])
        return [s.routes.reshape(shape) for s in samples]

    def batch(self, samples, replay):
        """The trainer's log-probabilities of all answers' tokens, in one line."""
        return self.model.logprobs([s.ids for s in samples], [len(s.prompt) for s in samples],
                                   self.routes(samples) if replay else None, temperature=self.o.temperature)

    def minibatch(self, samples, advantages, report):
        """One optimizer step, in parts of like lengths; fills the report if there is one."""
        tokens = sum(len(s.logprobs) for s in samples)
        order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
        both, plain = [], []
        for part in (order[i:i + 64] for i in range(0, len(order), 64)):
            some = [samples[i] for i in part]
            old = torch.tensor([x for s in some for x in s.logprobs])
            new = self.batch(some, self.o.replay == "train")
            adv = torch.cat([torch.full((len(samples[i].logprobs),), advantages[i]) for i in part])
            ratio = (new - old).exp()
            low, high = self.o.clip
            gain = torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)
            (-gain.sum() / tokens).backward()
            both.append((new.detach(), old))
            if report is not None and self.o.replay != "off":
                with torch.no_grad():
                    plain.append(self.batch(some, self.o.replay != "train"))
        if report is not None:
            own, server = (torch.cat(x) for x in zip(*both))
            other = torch.cat(plain) if plain else None
            with_replay = own if self.o.replay == "train" else other
            without = other if self.o.replay == "train" else own
            report["mismatch"] = mismatch(without, server)
            if with_replay is not None:
                report["mismatch_replay"] = mismatch(with_replay, server)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.updates += 1
        self.adam.param_groups[0]["lr"] = self.o.lr * min(1, self.updates / self.o.warmup)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), self.model.parameters()):
                a.lerp_(p, 1 - self.o.average)

    def step(self, number, rows):
        o, report = self.o, {"step": number}
        prompts = self.client.ids([PROMPT.format(p["question"]) for p in rows])
        groups = self.client.sample(prompts, o.group, o.most, o.seed * 100000 + number, o.replay != "off",
                                    o.temperature)
        samples, advantages, rewards = [], [], []
        for group, p in zip(groups, rows):
            if any(s.version != str(number) for s in group):
                raise RuntimeError(f"an answer of weight version {group[0].version} in step {number}")
            r = torch.tensor([float(s.finish == "stop" and right(s.text, p["answer"])) for s in group])
            rewards.append(r.mean().item())
            if r.std() > 0:
                samples += group
                advantages += ((r - r.mean()) / (r.std() + 1e-4)).tolist()
        report.update(reward=sum(rewards) / len(rewards), used=len(samples),
                      tokens=sum(len(s.logprobs) for g in groups for s in g))
        order = list(range(len(samples)))
        random.Random(number).shuffle(order)
        size = -(-len(order) // o.minibatches)
        for i in range(0, len(order), max(size, 1)):
            part = order[i:i + size]
            self.minibatch([samples[j] for j in part], [advantages[j] for j in part], report if i == 0 else None)
        return report

    def publish(self, version):
        folder = os.path.join(self.o.out, f"step-{version}")
        self.model.save(folder, like=self.o.model)
        r = self.client.update(folder, str(version))
        before = os.path.join(self.o.out, f"step-{version - 1}")
        if os.path.isdir(before):
            shutil.rmtree(before)
        return {"stage_s": r.get("stage_s"), "swap_s": r.get("swap_s")}


    def evaluate(self, number, rows):
        """Greedy accuracy of the averaged weights, and of the last ones, which are served again afterwards."""
        report = {"step": number, "questions": len(rows), "accuracy_last": self.client.accuracy(rows)}
        folder = os.path.join(self.o.out, "average")
        self.average.save(folder, like=self.o.model)
        self.client.update(folder, f"{number}-average")
        report["accuracy"] = self.client.accuracy(rows)
        self.client.update(os.path.join(self.o.out, f"step-{number}") if number else self.o.model, str(number))
        return report


def run(o, client):
    rows = held_out(o.held_out)
    stream = Stream(o.seed, [p["question"] for p in rows])
    trainer = Trainer(o, client)
    log, start = open(os.path.join(o.out, "log.jsonl"), "w"), time.time()

    def say(report):
        report["wall"], report["cpu_trainer"] = time.time() - start, sum(os.times()[:2])
        if isinstance(client, Server):
            report["cpu_server"] = client.cpu()
        report = {k: round(v, 6) if isinstance(v, float) else v for k, v in report.items()}
        print(json.dumps(report), file=log, flush=True)
        print(" ".join(f"{k} {v}" for k, v in report.items()), flush=True)

    client.update(o.model, "0")
    for number in range(o.steps + 1):
        if number % o.eval_every == 0 or number == o.steps:
            report = trainer.evaluate(number, rows[:o.questions])
            say(report)
            if number == o.steps or o.target and report["accuracy"] >= o.target:
                break
        report = trainer.step(number, stream.take(o.prompts))
        report.update(trainer.publish(number + 1))
        say(report)


def main():
    o = options()
    os.makedirs(o.out, exist_ok=True)
    torch.manual_seed(o.seed)
    torch.set_num_threads(o.threads)
    if o.url:
        return run(o, Client(o.url))
    flags = ["--threads", str(o.threads)] + (["--quantization", o.quantization] if o.quantization else [])
    if o.replay != "off":
        flags.append("--enable-return-routed-experts")
    with open(os.path.join(o.out, "server.log"), "w") as log:
        server = Server(o.moult, o.model, *flags, log=log)
        try:
            run(o, server)
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
