"""examples/rl with torch: the forward against transformers' float32, replay, checkpoints, a whole training step.

    python test/examples/test_rl.py [name ...]         # needs torch and build/moult ($MOULT)
"""
import argparse
import json
import os
import sys
import tempfile
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "examples/rl"), os.path.join(ROOT, "test/server")]
try:
    import torch
except ImportError as e:
    print(f"skip    test_rl: {e.name} is not installed")
    sys.exit(0)
import model as model_py  # noqa: E402
import rollout  # noqa: E402
import train  # noqa: E402
from model import Model  # noqa: E402

EARLY = os.path.join(ROOT, "models/tiny-moe-early")
MOULT = os.environ.get("MOULT", os.path.join(ROOT, "build/moult"))
STOPS = {2045, 2047}


def short_references():
    with open(os.path.join(ROOT, "test/data/early.reference.json")) as f:
        refs = json.load(f)["references_float32"]
    return sorted((r for r in refs if len(r["input_ids"]) > 1), key=lambda r: len(r["input_ids"]))[:8]


def test_forward_and_greedy():
    """transformers, float32: prompt logprobs (5 decimals) and greedy ids; packed rows of unequal length."""
    refs, m = short_references(), Model.load(EARLY)
    with torch.no_grad():
        got = m.logprobs([r["input_ids"] for r in refs]).split([len(r["input_ids"]) - 1 for r in refs])
    for g, r in zip(got, refs):
        off = (g - torch.tensor(r["prompt_logprobs"])).abs().max().item()
        assert off < 3e-4, (r["prompt"], off)
    for ids, r in zip(m.greedy([r["input_ids"] for r in refs], 24, STOPS), refs):
        want = [i for i in r["greedy_ids"] if i not in STOPS][:24]
        assert ids == want, (ids, want)


def test_replay():
    """Its own choices in any order of k give the same numbers; other choices do not."""
    m, ids = Model.load(EARLY), short_references()[-1]["input_ids"]
    with torch.no_grad():
        seen = []
        lp = m.logprobs([ids], seen=seen)
        routes = seen[0].numpy()
        assert routes.shape == (len(ids) - 1, m.c["num_hidden_layers"], m.c["num_experts_per_tok"])
        again = m.logprobs([ids], routes=[routes[:, :, ::-1].copy()])
        other = m.logprobs([ids], routes=[(routes + 1) % m.c["num_experts"]])
    assert (again - lp).abs().max() < 1e-4 and (other - lp).abs().max() > 0.1
    both = m.logprobs([ids, ids[:5]], [3, 2], [routes, routes[:4]])
    assert (both - torch.cat((lp[2:], lp[1:4]))).abs().max() < 1e-4


def test_checkpoints():
    """save() writes what load() reads: the nearest BF16 values, bit for bit; its own names and order."""
    m = Model.load(EARLY)
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1.01)
    with tempfile.TemporaryDirectory() as d:
        m.save(d, like=EARLY)
        a, b, n = model_py.read_safetensors(d), model_py.read_safetensors(EARLY), 0
        assert a.keys() == b.keys()
        for name, t in a.items():
            assert t.dtype == torch.bfloat16 and torch.equal(t, (b[name].float() * 1.01).bfloat16()), name
            n += not torch.equal(t, b[name])
        assert n > 100
        again = Model.load(d)
        again.rounded = m.rounded = True
        ids = short_references()[0]["input_ids"]
        assert torch.equal(m.logprobs([ids]), again.logprobs([ids]))


def test_judge():
    """The judge of `moult bench gsm8k`, and problems that are not held out."""
    assert rollout.right("so 1,204 left\n#### 1,204", "#### 1204") and not rollout.right("#### 12", "#### 1204")
    assert not rollout.right("none", "#### 3")
    held = {p["question"] for p in train.held_out(os.path.join(ROOT, "models/gsm-tiny.jsonl"))}
    assert len(held) == 1209
    some = train.Stream(0, held).take(3000)
    assert len({p["question"] for p in some} | held) == 4209
    free = train.Stream(0, ()).take(3000)
    assert some[:20] == train.Stream(0, held).take(20) and some[:20] != train.Stream(1, held).take(20) and free


def test_gradient():
    """A step raises the probability of answers with a positive advantage, lowers the others; ratio 1 is the policy gradient."""
    o = argparse.Namespace(model=EARLY, lr=1e-4, warmup=1, replay="off", clip=(0.2, 0.28), frozen=["gate"],
                           beta2=0.95, average=0.5, temperature=0.8)
    t = train.Trainer(o, None)
    gate, old_head, old_gate = t.model.layers[0]["gate"], t.model.head.clone(), t.model.layers[0]["gate"].clone()
    samples = []
    for r in short_references()[-4:]:
        s = rollout.Sample(r["input_ids"], {"output_ids": r["greedy_ids"][:16], "text": "", "meta_info": {
            "output_token_logprobs": [], "weight_version": "0", "finish_reason": {"type": "stop"}}})
        with torch.no_grad():
            s.logprobs = t.batch([s], False).tolist()
        samples.append(s)
    report = {}
    t.minibatch(samples, [1.0, 1.0, -1.0, -1.0], report)
    assert report["mismatch"]["max"] < 1e-4
    with torch.no_grad():
        gain = [t.batch([s], False).sum().item() - sum(s.logprobs) for s in samples]
    assert min(gain[:2]) > 0 > max(gain[2:]), gain
    with torch.no_grad():
        assert torch.equal(gate, old_gate) and not torch.equal(t.model.head, old_head)
        torch.testing.assert_close(t.average.head, (old_head + t.model.head) / 2)
        row, logits = samples[0].ids, t.model.logprobs([samples[0].ids])
        cool = t.model.logprobs([row], temperature=0.5)
        assert cool.mean() != logits.mean() and torch.equal(t.model.logprobs([row], temperature=1.0), logits)


def test_one_step_end_to_end():
    """Rollouts, a step, a checkpoint, an update in place: the server then answers with the trainer's weights."""
    with tempfile.TemporaryDirectory() as d:
        sys.argv = ["train.py", "--out", d, "--steps", "1", "--prompts", "4", "--group", "6", "--minibatches", "1",
                    "--questions", "8", "--most", "96", "--threads", "1", "--lr", "1e-3", "--warmup", "1"]
        o = train.options()
        server = rollout.Server(MOULT, EARLY, "--threads", "1")
        try:
            before = server.ids([rollout.PROMPT.format("Ada has 3 apples.")])[0]
            train.run(o, server)
            with open(os.path.join(d, "log.jsonl")) as f:
                log = [json.loads(line) for line in f]
            assert [r["step"] for r in log] == [0, 0, 1] and "accuracy" in log[0] and "accuracy" in log[2], log
            step = log[1]
            assert step["used"] > 0 and 0 < step["reward"] < 1, step
            assert step["mismatch"]["mean"] < 3e-3 and 0 < step["mismatch"]["kl"] < 1e-3, step
            assert server.ask("GET", "/get_weight_version")["weight_version"] == "1"
            s = server.sample([before], 2, 24, 5)[0]
            assert s[0].version == "1"
            new, old = Model.load(os.path.join(d, "step-1")), Model.load(EARLY)
            with torch.no_grad():
                own, stale = (x.logprobs([y.ids for y in s], [len(before)] * 2) for x in (new, old))
            told = torch.tensor(s[0].logprobs + s[1].logprobs)
            near, far = (own - told).abs().mean().item(), (stale - told).abs().mean().item()
            print(f"  mean difference from the server: new weights {near:.2g}, old {far:.2g}")
            assert near < 3e-3 and far > 5 * near, (near, far)
        finally:
            server.stop()


def main():
    names = sys.argv[1:] or [n for n in globals() if n.startswith("test_")]
    torch.set_num_threads(1)
    failed = 0
    for name in names:
        try:
            globals()[name]()
            print("ok     ", name)
        except Exception:
            failed += 1
            traceback.print_exc()
            print("FAILED ", name)
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
