"""Group-relative policy gradient on word problems, rollouts by Moult, weights replaced while it serves.

    python3 examples/rl/train.py --out /tmp/rl          # README.md says what comes out

A step: the server samples `--group` answers to each of `--prompts` problems; a right answer earns 1, and
the tokens of each calculation in it that is true earn `--notes`; advantages are those less the group's means.
Groups that are all right or all wrong are left out; problems of medium difficulty are asked again in a later
step.  The objective is PPO's clipped one on the ratio of the trainer's probability to the one that the server
reported, so that it also corrects for how the two differ.  After `--minibatches` optimizer steps the weights are written as BF16 and the server
loads them in place, under the next weight version.

Mismatch is taken on the first minibatch, when both sides hold the same weights.
"""
import argparse
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import time

import torch

import problems
from model import Model
from muon import Muon
from rollout import PROMPT, Client, Server, notes, right

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))


def options():
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    p.add_argument("--out", required=True, help="folder for log.jsonl and the checkpoints")
    p.add_argument("--url", help="a running server of --model; without it one is started")
    p.add_argument("--moult", default=os.path.join(ROOT, "build/moult"), help="the program to start")
    p.add_argument("--quantization", help="of the rollouts, for the server that is started: nvfp4, mxfp8, ...")
    p.add_argument("--as-served", action="store_true",
                   help="with --quantization: the trainer computes with the weights as the server rounds them")
    p.add_argument("--model", default=os.path.join(ROOT, "models/tiny-moe-early"))
    p.add_argument("--held-out", default=os.path.join(ROOT, "models/gsm-tiny.jsonl"))
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--seconds", type=float, help="start no step later than this, counted from the start")
    p.add_argument("--prompts", type=int, default=32, help="problems a step")
    p.add_argument("--group", type=int, default=8, help="answers to a problem")
    p.add_argument("--again", type=int, default=3, help="times that a problem of medium difficulty is asked again")
    p.add_argument("--notes", type=float, default=0.5, help="reward of a true calculation, for its own tokens; 0: none")
    p.add_argument("--minibatches", type=int, default=2, help="optimizer steps a step")
    p.add_argument("--most", type=int, default=160, help="new tokens of an answer")
    p.add_argument("--temperature", type=float, default=0.8, help="of the answers, in both programs")
    p.add_argument("--lr", type=float, default=1.2e-4, help="Muon's, at first; falls to a tenth of it over the run")
    p.add_argument("--momentum", type=float, default=0.95, help="Muon's")
    p.add_argument("--frozen", nargs="*", default=["embed", "head", "gate"], metavar="NAME",
                   help="matrices that stay; vectors do in any case")
    p.add_argument("--clip", type=float, nargs=2, default=(0.2, 0.28), help="below and above 1")
    p.add_argument("--cap", type=float, default=2, help="of the ratio where the advantage is negative; no gradient above it")
    p.add_argument("--average", type=float, default=0.97, help="decay an optimizer step of the average that is evaluated")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--eval-every", type=int, default=25, help="steps; also before the first and after the last")
    p.add_argument("--questions", type=int, nargs=2, default=(403, 1209), help="of an evaluation, and of the last one")
    p.add_argument("--replay", choices=("off", "report", "train"), default="off",
                   help="routing replay: report the mismatch with it too, or also train with it")
    p.add_argument("--threads", type=int, default=2, help="of the trainer, and of the server that is started")
    o = p.parse_args()
    if o.as_served and not o.quantization:
        p.error("--as-served needs --quantization: without it the server holds the trainer's weights as they are")
    return o


def held_out(path):
    """The rows after the 8 that serve as shots elsewhere."""
    with open(path) as f:
        return [json.loads(line) for line in f][8:]


class Stream:
    """Problems without end, none of them in `exclude`.  At most half of those taken are ones given back: those
    that were answered right in more than a tenth and less than nine tenths of the attempts."""

    def __init__(self, seed, exclude, again=0):
        self.random, self.seen, self.again = random.Random(7_000_000 + seed), set(exclude), again
        self.times, self.back = {}, []

    def take(self, n):
        self.random.shuffle(self.back)
        half = min(len(self.back), n // 2)
        out, self.back = self.back[:half], self.back[half:]
        while len(out) < n:
            p = problems.problem(self.random)
            if p["question"] not in self.seen:
                self.seen.add(p["question"])
                out.append(p)
        return out

    def give_back(self, p, rate):
        times = self.times.get(p["question"], 0)
        if 0.1 < rate < 0.9 and times < self.again:
            self.times[p["question"]] = times + 1
            self.back.append(p)


def credit(group, rewards, weight):
    """The advantage of every token of the answers of a group.

    The tokens of a calculation also get `weight` if its note <<a+b=c>> is true, less the mean of the group's notes.
    What comes after the first false one in a wrong answer is not blamed for the answer."""
    mean, found = sum(rewards) / len(group), [notes(s) if weight else [] for s in group]
    share = sum(true for f in found for _, true in f) / max(1, sum(len(f) for f in found))
    out = []
    for s, reward, f in zip(group, rewards, found):
        a, start = torch.full((len(s.logprobs),), reward - mean), 0
        wrong = [end for end, true in f if not true]
        if wrong and not reward:
            a[wrong[0]:] = 0
        for end, true in f:
            a[start:end] += weight * (true - share)
            start = end
        out.append(a)
    return out


def mismatch(trainer, server):
    """What the two say of the same tokens: mean and largest |difference|, and KL(server || trainer) by k3."""
    d = (trainer - server).double()
    return {"mean": d.abs().mean().item(), "max": d.abs().max().item(), "kl": (d.exp() - 1 - d).mean().item()}


class Trainer:
    """`model` holds what the server is given, BF16 values, or with --as-served what it makes of them; Muon moves
    float32 copies, `exact`, by the gradients at `model`; `average` is the mean of those over the optimizer's steps,
    the last ones counting most."""

    def __init__(self, o, client):
        self.o, self.client, self.next = o, client, os.path.join(o.out, "next")
        self.model = Model.load(o.model)
        for name, p in self.model.named_parameters():
            p.requires_grad_(p.dim() > 1 and not any(word in name.split(".") for word in o.frozen))
        self.average = copy.deepcopy(self.model)
        self.learned, self.averaged = ([p for p in m.parameters() if p.requires_grad] for m in (self.model, self.average))
        self.exact = [p.detach().clone() for p in self.learned]
        self.muon, self.progress = Muon(self.exact, o.lr, o.momentum), 0.0
        self.model.save(self.next, like=o.model)
        self.round()

    def routes(self, samples):
        c = self.model.c
        shape = (-1, c["num_hidden_layers"], c["num_experts_per_tok"])
        return [s.routes.reshape(shape) for s in samples]

    def batch(self, samples, replay):
        """The trainer's log-probabilities of all answers' tokens, in one line."""
        return self.model.logprobs([s.ids for s in samples], [len(s.prompt) for s in samples],
                                   self.routes(samples) if replay else None, temperature=self.o.temperature)

    def minibatch(self, groups, report):
        """One optimizer step on groups of (answer, advantages), in parts of like lengths; fills the report if there
        is one."""
        tokens = sum(len(s.logprobs) for g in groups for s, _ in g)
        groups = sorted(groups, key=lambda g: max(len(s.ids) for s, _ in g))
        both, plain = [], []
        for part in (groups[i:i + 4] for i in range(0, len(groups), 4)):
            some = [s for g in part for s, _ in g]
            adv = torch.cat([a for g in part for _, a in g])
            old = torch.tensor([x for s in some for x in s.logprobs])
            new = self.batch(some, self.o.replay == "train")
            ratio = (new - old).exp()
            low, high = self.o.clip
            gain = torch.minimum(ratio * adv, ratio.clamp(1 - low, 1 + high) * adv)
            gain = torch.where(adv < 0, torch.maximum(gain, self.o.cap * adv), gain)
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
        self.update()

    @torch.no_grad()
    def update(self):
        self.muon.step([p.grad for p in self.learned], 1 - 0.9 * self.progress)
        for p, exact, average in zip(self.learned, self.exact, self.averaged):
            p.copy_(exact.bfloat16())
            p.grad = None
            average.lerp_(exact, 1 - self.o.average)
        self.model.save(self.next, like=self.o.model)
        self.round()

    @torch.no_grad()
    def round(self):
        """With --as-served: `model` gets the weights of the folder `next` quantized and back, by the server's program."""
        if not self.o.as_served:
            return
        there, back = (os.path.join(self.o.out, name) for name in ("quantized", "rounded"))
        for d in (there, back):
            shutil.rmtree(d, ignore_errors=True)
        for command in ([self.next, there, "--format", self.o.quantization], [there, back, "--format", "bf16", "--requantize"]):
            subprocess.run([self.o.moult, "quantize", *command], check=True, stdout=subprocess.DEVNULL)
        rounded = dict(Model.load(back).named_parameters())
        for name, p in self.model.named_parameters():
            p.copy_(rounded[name])

    def step(self, number, stream):
        o, report, start = self.o, {"step": number}, time.time()
        rows = stream.take(o.prompts)
        prompts = self.client.ids([PROMPT.format(p["question"]) for p in rows])
        answers = self.client.sample(prompts, o.group, o.most, o.seed * 100000 + number, o.replay != "off",
                                     o.temperature)
        sampled, groups, rewards = time.time(), [], []
        for group, p in zip(answers, rows):
            if any(s.version != str(number) for s in group):
                raise RuntimeError(f"an answer of weight version {group[0].version} in step {number}")
            r = [float(s.finish == "stop" and right(s.text, p["answer"])) for s in group]
            mean = sum(r) / len(r)
            rewards.append(mean)
            stream.give_back(p, mean)
            if 0 < mean < 1:
                groups.append(list(zip(group, credit(group, r, o.notes))))
        size = max(1, -(-len(groups) // o.minibatches))
        for i in range(0, len(groups), size):
            self.minibatch(groups[i:i + size], report if i == 0 else None)
        report.update(reward=sum(rewards) / len(rewards), used=sum(len(g) for g in groups),
                      tokens=sum(len(s.logprobs) for g in answers for s in g),
                      sample_s=sampled - start, train_s=time.time() - sampled)
        return report

    def publish(self, version):
        folder = os.path.join(self.o.out, f"step-{version}")
        shutil.copytree(self.next, folder, dirs_exist_ok=True)  # of a run before into the same --out
        r = self.client.update(folder, str(version))
        before = os.path.join(self.o.out, f"step-{version - 1}")
        if os.path.isdir(before):
            shutil.rmtree(before)
        return {"stage_s": r.get("stage_s"), "swap_s": r.get("swap_s")}

    def evaluate(self, number, rows):
        """Greedy accuracy of the averaged weights; afterwards the last ones are served again."""
        folder = os.path.join(self.o.out, "average")
        self.average.save(folder, like=self.o.model)
        self.client.update(folder, f"{number}-average")
        report = {"step": number, "questions": len(rows), "accuracy": self.client.accuracy(rows)}
        self.client.update(os.path.join(self.o.out, f"step-{number}") if number else self.o.model, str(number))
        return report


def run(o, client, start):
    rows = held_out(o.held_out)
    stream = Stream(o.seed, [p["question"] for p in rows], o.again)
    trainer = Trainer(o, client)
    log = open(os.path.join(o.out, "log.jsonl"), "w")

    def say(report):
        report["wall"], report["cpu_trainer"] = time.time() - start, sum(os.times()[:2])
        if isinstance(client, Server):
            report["cpu_server"] = client.cpu()
        report = {k: round(v, 6) if isinstance(v, float) else v for k, v in report.items()}
        print(json.dumps(report), file=log, flush=True)
        print(" ".join(f"{k} {v}" for k, v in report.items()), flush=True)

    client.update(o.model, "0")
    for number in range(o.steps + 1):
        trainer.progress = max(number / max(1, o.steps), (time.time() - start) / o.seconds if o.seconds else 0)
        last = trainer.progress >= 1
        if last or number % o.eval_every == 0:
            say(trainer.evaluate(number, rows[:o.questions[last]]))
        if last:
            break
        report = trainer.step(number, stream)
        report.update(trainer.publish(number + 1))
        say(report)


def main():
    o, start = options(), time.time()
    os.makedirs(o.out, exist_ok=True)
    torch.manual_seed(o.seed)
    torch.set_num_threads(o.threads)
    if o.url:
        return run(o, Client(o.url), start)
    flags = ["--threads", str(o.threads)] + (["--quantization", o.quantization] if o.quantization else [])
    if o.replay != "off":
        flags.append("--enable-return-routed-experts")
    with open(os.path.join(o.out, "server.log"), "w") as log:
        server = Server(o.moult, o.model, *flags, log=log)
        try:
            run(o, server, start)
        finally:
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
