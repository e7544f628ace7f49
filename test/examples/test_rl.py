"""examples/rl with torch: the forward against transformers' float32, replay, checkpoints, a whole training step.

    python test/examples/test_rl.py [name ...]         # needs torch and build/moult ($MOULT)
"""
import argparse
import json
import os
import sys
import tempfile
import time
import traceback

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "examples/rl"), os.path.join(ROOT, "test/server")]
try:
    import torch
except ImportError as e:
    print(f"skip    test_rl: {e.name} is not installed")
    sys.exit(0)
import model as model_py  # noqa: E402
import muon  # noqa: E402
import rollout  # noqa: E402
import train  # noqa: E402
from model import Model  # noqa: E402

EARLY = os.path.join(ROOT, "models/tiny-moe-early")
MOULT = os.environ.get("MOULT", os.path.join(ROOT, "build/moult"))


def short_references():
    with open(os.path.join(ROOT, "test/data/early.reference.json")) as f:
        refs = json.load(f)["references_float32"]
    return sorted((r for r in refs if len(r["input_ids"]) > 1), key=lambda r: len(r["input_ids"]))[:8]


def test_forward():
    """transformers, float32: prompt logprobs (5 decimals), and its greedy ids are the likeliest here; packed rows of
    unequal length."""
    refs, m = short_references(), Model.load(EARLY)
    with torch.no_grad():
        got = m.logprobs([r["input_ids"] for r in refs]).split([len(r["input_ids"]) - 1 for r in refs])
        for g, r in zip(got, refs):
            off = (g - torch.tensor(r["prompt_logprobs"])).abs().max().item()
            assert off < 3e-4, (r["prompt"], off)
        n = 0
        for r in refs:
            row, start = r["input_ids"] + r["greedy_ids"][:24], len(r["input_ids"])
            pack = model_py.Pack([row[:-1]], [start])
            logits = torch.nn.functional.linear(m.hidden(pack)[start - 1:], m.head)
            assert logits.argmax(-1).tolist() == row[start:], r["prompt"]
            n += len(row) - start
        assert n > 100


def test_shared_prompts():
    """Answers that share a prompt, packed or one by one: the same numbers and the same gradients; an empty answer too."""
    m, refs = Model.load(EARLY), short_references()
    m.embed.requires_grad_(False)
    rows, starts = [], []
    for a, b in zip(refs[-4:-2], refs[-2:]):
        prompt = a["input_ids"]
        for tail in (a["greedy_ids"][:20], b["greedy_ids"][:9], [7], a["greedy_ids"][:3]):
            rows.append(prompt + tail)
            starts.append(len(prompt))
    weight = torch.linspace(-1, 1, sum(len(r) - s for r, s in zip(rows, starts)))
    both = []
    for parts in ([slice(0, 8)], [slice(i, i + 1) for i in range(8)], [slice(2, 3), slice(0, 2), slice(3, 8)]):
        lp = [m.logprobs(rows[p], starts[p], temperature=0.7) for p in parts]
        lp = torch.cat(lp if len(lp) != 3 else [lp[1], lp[0], lp[2]])
        m.zero_grad()
        (lp * weight).sum().backward()
        both.append((lp.detach(), [p.grad.clone() for p in m.parameters() if p.grad is not None]))
    assert len(model_py.Pack([r[:-1] for r in rows], starts).heads.lengths) == 2
    for lp, grads in both[1:]:
        torch.testing.assert_close(lp, both[0][0], atol=1e-4, rtol=0)
        for x, y in zip(grads, both[0][1]):
            assert (x - y).norm() < 1e-4 * y.norm() + 1e-9


def test_muon():
    """An update has singular values near one where the gradient has any, in matrices of either shape and in stacks."""
    for shape in ((6, 20), (20, 6), (3, 8, 5)):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        x = muon.orthogonal(g)
        values = torch.linalg.svdvals(x)
        assert 0.5 < values.min() and values.max() < 1.3, values
        u, _, v = torch.linalg.svd(g, full_matrices=False)
        assert torch.nn.functional.cosine_similarity(x.flatten(), (u @ v).flatten(), 0) > 0.95
    p = torch.zeros(4, 16)
    m, g = muon.Muon([p], 0.1, 0.5), torch.eye(4, 16)
    m.step([g], 0.5)
    torch.testing.assert_close(p, -0.2 * 4 * 0.1 * 0.5 * muon.orthogonal(g))
    m.step([-g])                     # momentum: -g + g / 2, and half of that again before the update
    assert p.diagonal().min() > -0.04 and torch.equal(m.mean[0], -g / 2)


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
        for p in m.parameters():
            p.data = p.bfloat16().float()
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
    assert some[:20] == train.Stream(0, held).take(20) and some[:20] != train.Stream(1, held).take(20)


def test_given_back():
    """Problems of medium difficulty come again, at most half of a step and `again` times; others never."""
    stream, times = train.Stream(3, (), again=2), {}
    for _ in range(40):
        rows = stream.take(8)
        old = sum(p["question"] in times for p in rows)
        assert old <= 4
        for i, p in enumerate(rows):
            times[p["question"]] = times.get(p["question"], 0) + 1
            stream.give_back(p, 0.5 if times[p["question"]] > 1 else (0.0, 0.125, 0.875, 1.0)[i % 4])
    assert set(times.values()) == {1, 2, 3} and sum(times.values()) == 320 and len(times) < 220


def answer(text):
    """A Sample of one token a character."""
    return rollout.Sample([1], {"output_ids": list(range(len(text))), "text": text, "meta_info": {
        "output_token_logprobs": [[-1.0, i, c] for i, c in enumerate(text)], "weight_version": "0",
        "finish_reason": {"type": "stop"}}})


def test_credit():
    """Which calculations are true, and whose tokens that rewards."""
    text = "2+3=<<2+3=5>>5 so <<5*4=21>>21, <<21/7=3>>3, <<9-1=8>>8, <<1/0=0>> <<7/2=3>> <<x=1>> <<4=4>>"
    assert [(text[:n][-4:], t) for n, t in rollout.notes(answer(text))] == [
        ("=5>>", True), ("21>>", False), ("=3>>", True), ("=8>>", True), ("=0>>", False), ("=3>>", False)]
    two = answer("a")
    two.pieces = ["<<1+", "1=2>", ">.", ""]
    assert rollout.notes(two) == [(3, True)]
    good, bad = answer("a <<1+1=2>> b <<2+2=4>> c"), answer("a <<1+1=3>> b <<3+2=5>> c")
    plain = train.credit([good, bad], [1.0, 0.0], 0.0)
    assert all((a == x).all() for a, x in zip(plain, (0.5, -0.5)))
    g, b = train.credit([good, bad], [1.0, 0.0], 0.4)        # three of four true
    n = len("a <<1+1=2>>")
    torch.testing.assert_close(g, torch.tensor([0.6] * (2 * n + 1) + [0.5] * 2))
    torch.testing.assert_close(b, torch.tensor([-0.8] * n + [0.1] * (n + 1) + [0.0] * 2))


def trainer(d, **options):
    """One without a server; its folders are in d."""
    o = dict(model=EARLY, out=d, moult=MOULT, lr=1e-3, momentum=0.9, replay="off", clip=(0.2, 0.28), cap=2, frozen=[],
             average=0.5, temperature=0.8, as_served=False)
    return train.Trainer(argparse.Namespace(**{**o, **options}), None)


def test_gradient():
    """A step raises the probability of answers with a positive advantage, lowers the others; what is frozen stays."""
    with tempfile.TemporaryDirectory() as d:
        gradient(trainer(d, frozen=["gate"]))


def gradient(t):
    layer = t.model.layers[0]
    old_head, old_gate, old_norm = t.model.head.clone(), layer["gate"].clone(), layer["input_layernorm"].clone()
    samples = []
    for r in short_references()[-4:]:
        s = rollout.Sample(r["input_ids"], {"output_ids": r["greedy_ids"][:16], "text": "", "meta_info": {
            "output_token_logprobs": [], "weight_version": "0", "finish_reason": {"type": "stop"}}})
        with torch.no_grad():
            s.logprobs = t.batch([s], False).tolist()
        samples.append(s)
    report = {}
    t.minibatch([[(s, torch.full((len(s.logprobs),), a)) for s, a in zip(samples[i:i + 2], (1.0, -1.0))] for i in (0, 2)], report)
    assert report["mismatch"]["max"] < 1e-4
    with torch.no_grad():
        gain = [t.batch([s], False).sum().item() - sum(s.logprobs) for s in samples]
        assert min(gain[::2]) > 0 > max(gain[1::2]), gain
        assert torch.equal(layer["gate"], old_gate) and torch.equal(layer["input_layernorm"], old_norm)
        exact = t.exact[[p is t.model.head for p in t.learned].index(True)]
        assert not torch.equal(t.model.head, old_head) and torch.equal(t.model.head, exact.bfloat16().float())
        torch.testing.assert_close(t.average.head, (old_head + exact) / 2)
        row, logits = samples[0].ids, t.model.logprobs([samples[0].ids])
        cool = t.model.logprobs([row], temperature=0.5)
        assert cool.mean() != logits.mean() and torch.equal(t.model.logprobs([row], temperature=1.0), logits)


def test_clipping():
    """Where the ratio has left the clip range in the direction of the advantage, nothing moves; nor above the cap."""
    ids = short_references()[-1]["input_ids"]
    with tempfile.TemporaryDirectory() as d:
        for case in ((-0.3, 1.0, False), (-0.2, 1.0, True), (0.3, -1.0, False), (0.3, 1.0, True), (-0.6, -1.0, True),
                     (-0.8, -1.0, False)):
            clipping(trainer(d), ids, *case)


def clipping(t, ids, shift, advantage, moves):
    s = rollout.Sample(ids[:5], {"output_ids": ids[5:], "text": "", "meta_info": {
        "output_token_logprobs": [], "weight_version": "0", "finish_reason": {"type": "stop"}}})
    with torch.no_grad():
        s.logprobs = (t.batch([s], False) + shift).tolist()
    t.minibatch([[(s, torch.full((len(s.logprobs),), advantage))]], None)
    assert any((m != 0).any() for m in t.muon.mean) == moves, (shift, advantage)


def test_as_served():
    """The trainer's weights are those that the server makes of the same folder: log-probabilities as near as in BF16."""
    for quantization in ("nvfp4", "mxfp8"):
        server = rollout.Server(MOULT, EARLY, "--threads", "1", "--quantization", quantization)
        try:
            prompt = server.ids([rollout.PROMPT.format("Ada has 3 apples and eats 2.")])[0]
            some = server.sample([prompt], 4, 24, 5)[0]
        finally:
            server.stop()
        told, off = torch.tensor([x for s in some for x in s.logprobs]), []
        for as_served in (True, False):
            with tempfile.TemporaryDirectory() as d, torch.no_grad():
                t = trainer(d, as_served=as_served, quantization=quantization, temperature=1.0)
                off.append((t.batch(some, False) - told).abs().mean().item())
        print(f"  {quantization}: mean difference from the server {off[0]:.2g}, without --as-served {off[1]:.2g}")
        assert off[0] < 2e-3 and off[1] > 2 * off[0], off


def test_one_step_end_to_end():
    """Rollouts, a step, a checkpoint, an update in place: the server then answers with the trainer's weights."""
    with tempfile.TemporaryDirectory() as d:
        sys.argv = ["train.py", "--out", d, "--steps", "1", "--prompts", "4", "--group", "6", "--minibatches", "1",
                    "--questions", "8", "12", "--most", "96", "--threads", "1", "--lr", "1e-2"]
        o = train.options()
        os.makedirs(os.path.join(d, "step-1"))  # a run before left its last weights
        server = rollout.Server(MOULT, EARLY, "--threads", "1")
        try:
            before = server.ids([rollout.PROMPT.format("Ada has 3 apples.")])[0]
            train.run(o, server, time.time())
            with open(os.path.join(d, "log.jsonl")) as f:
                log = [json.loads(line) for line in f]
            assert [r["step"] for r in log] == [0, 0, 1] and "accuracy" in log[0] and log[2]["questions"] == 12, log
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
