"""python/moult.py on a GPU against a torch float64 reference: formats, forms, dtypes, streams, graphs.

    python test/python/test_moult_cuda.py [name ...]

Without torch or a GPU it says so and passes; MOULT_NEED_GPU=1 makes that a failure.
"""
import os
import sys
import traceback

import numpy as np

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import test_moult as cpu  # noqa: E402
from test_moult import moult, torch  # noqa: E402

HIDDEN, INNER, EXPERTS, K = 256, 136, 16, 4


def on_gpu(m):
    """moult.Matrices with its arrays on the GPU."""
    def to(a):
        if a is None:
            return None
        return torch.from_numpy(a.view(np.int16) if a.dtype == np.uint16 else a).cuda()
    return moult.Matrices(m.format, to(m.data), to(m.scale), to(m.tensor_scale), to(m.input_scale))


def reference(x, ids, weights, ms):
    """float64 on the GPU: y and the sum of absolute products."""
    w = [torch.from_numpy(np.stack([m[i].value for m in ms])).cuda() for i in range(3)]
    x, weights = x.double(), weights.double()
    y, size = torch.zeros_like(x), torch.zeros_like(x)
    for j in range(ids.shape[1]):
        g, u, d = (v[ids[:, j].long()] for v in w)
        gate, up = torch.einsum("nih,nh->ni", g, x), torch.einsum("nih,nh->ni", u, x)
        h = gate * torch.sigmoid(gate) * up
        y += weights[:, j:j + 1] * torch.einsum("nhi,ni->nh", d, h)
        size += weights[:, j:j + 1].abs() * torch.einsum("nhi,ni->nh", d.abs(), h.abs())
    return y, size


def close(y, expect, size, out_rounding=0.0):
    off = (y.double() - expect).abs() / (size + 1e-30)
    worst, mean = off.max().item(), (off ** 2).mean().item() ** .5
    assert worst <= 2. ** -7 + out_rounding and mean <= 2. ** -9 + out_rounding, (worst, mean)


def new(**fields):
    return moult.Moe(HIDDEN, INNER, EXPERTS, K, device="cuda", routing_method=moult.ROUTE_RENORMALIZE, **fields)


def inputs(rng, n):
    x = torch.from_numpy(rng.normal(0, 1, (n, HIDDEN)).astype(np.float32)).cuda().bfloat16()
    logits = torch.from_numpy(rng.normal(0, 2, (n, EXPERTS)).astype(np.float32)).cuda()
    return x, logits


def top_k(logits):
    v, ids = logits.double().topk(K, dim=1)
    return ids.int(), torch.softmax(v, 1).float().bfloat16()


def test_formats():
    rng = np.random.default_rng(1)
    for f in cpu.FORMATS:
        ms, w = cpu.rig(rng, f, HIDDEN, INNER, EXPERTS)
        for n in (1, 7, 130, 700):
            x, logits = inputs(rng, n)
            ids, weights = top_k(logits)
            expect = reference(x, ids, weights, ms)
            moe = new()
            moe.set_weights(**{k: on_gpu(v) for k, v in w.items()})
            packed = torch.empty(n, K, dtype=torch.int32, device="cuda")
            y = moe.run(x, logits=logits, output_dtype="f32", packed_out=packed)
            assert y.is_cuda and y.dtype == torch.float32
            close(y, *expect)
            chosen = (packed & 0xffff).short().view(torch.bfloat16)
            assert torch.equal(packed >> 16, ids) and (chosen - weights).abs().max() <= 2. ** -8
            assert torch.equal(y, moe.run(x, topk_ids=ids, topk_weights=chosen, output_dtype="f32"))
            assert torch.equal(y, moe.run(x, packed=packed, output_dtype="f32"))
            moe.set_weights(**w)  # from the CPU: the same
            assert torch.equal(y, moe.run(x.float(), logits=logits))
            half = moe.run(x, logits=logits)
            assert half.dtype == torch.bfloat16 and torch.equal(half, y.bfloat16())
            moe.close()
        print("  " + f)


def test_outputs_and_streams():
    rng = np.random.default_rng(2)
    ms, w = cpu.rig(rng, "nvfp4", HIDDEN, INNER, EXPERTS)
    need = moult.workspace_bytes(HIDDEN, INNER, EXPERTS, K, device="cuda", max_tokens=64)
    moe = new(max_tokens=64, workspace=torch.empty(need, dtype=torch.uint8, device="cuda"))
    moe.set_weights(**w)
    x, logits = inputs(rng, 150)
    replay = torch.zeros(150, K, dtype=torch.int16, device="cuda")
    packed = torch.zeros(150, K, dtype=torch.int32, device="cuda")
    y = moe.run(x, logits=logits, replay_out=replay, packed_out=packed)
    ids, _ = top_k(logits)
    assert torch.equal(replay.int(), ids) and torch.equal(packed >> 16, ids)
    assert torch.equal(y, moe.run(x, logits=logits, replay_ids=replay))
    wide = torch.zeros(150, 2 * HIDDEN, dtype=torch.bfloat16, device="cuda")
    wide[:, ::2] = x
    assert torch.equal(y, moe.run(wide[:, ::2], logits=logits))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        z = moe.run(x, logits=logits)
    side.synchronize()
    assert torch.equal(y, z)
    return moe, x, logits, y


def test_graph():
    moe, x, logits, y = test_outputs_and_streams()
    out = torch.full_like(y, float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        moe.run(x, logits=logits, out=out)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, y)
    rng = np.random.default_rng(3)
    x.copy_(inputs(rng, 150)[0])
    moe.set_weights(**cpu.rig(rng, "nvfp4", HIDDEN, INNER, EXPERTS)[1])  # in place
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, moe.run(x, logits=logits)) and not torch.equal(out, y)


def test_resident():
    rng = np.random.default_rng(4)
    for f in cpu.FORMATS:
        ms, w = cpu.rig(rng, f, HIDDEN, INNER, EXPERTS)
        moe, other = new(), new()
        moe.set_weights(**w)
        packed = [[other.pack(f, *m.value.shape, torch.from_numpy(m.data.view(np.uint8)).cuda(),
                              None if m.scale is None else torch.from_numpy(m.scale.view(np.uint8)).cuda(),
                              None if m.tensor is None else torch.tensor([m.tensor]).cuda()) for m in e] for e in ms]
        m = ms[3][1]
        data, scale, tensor, _ = moe.unpack(f, INNER, HIDDEN, packed[3][1])
        assert data.cpu().numpy().tobytes() == m.data.tobytes()
        assert m.scale is None or scale.cpu().numpy().tobytes() == m.scale.tobytes()
        assert m.tensor is None or tensor == float(m.tensor)
        other.set_weights(**w, arrangement=moult.RESIDENT, resident=packed)
        x, logits = inputs(rng, 20)
        assert torch.equal(moe.run(x, logits=logits), other.run(x, logits=logits))


def test_errors():
    rng = np.random.default_rng(5)
    ms, w = cpu.rig(rng, "nvfp4", HIDDEN, INNER, EXPERTS)
    moe = new()
    x, logits = inputs(rng, 3)
    cpu.fails(moult.ERR_STATE, "weights", lambda: moe.run(x, logits=logits))
    moe.set_weights(**w)
    cpu.fails(moult.ERR_UNSUPPORTED, "device: cpu", lambda: moe.run(x.cpu(), logits=logits))
    cpu.fails(moult.ERR_UNSUPPORTED, "device: cpu", lambda: moe.run(x, logits=logits.cpu()))
    cpu.fails(moult.ERR_INPUT, "dense", lambda: moe.run(x, logits=logits, out=torch.zeros(3, 512, device="cuda")[:, ::2]))
    cpu.fails(moult.ERR_UNSUPPORTED, "hidden_size", lambda: moult.Moe(100, 48, 8, 2, device="cuda"))
    cpu.fails(moult.ERR_UNSUPPORTED, "GPU 77", lambda: moult.Moe(64, 48, 8, 2, device="cuda:77"))
    host = moult.Moe(HIDDEN, INNER, EXPERTS, K)
    host.set_weights(**w)
    cpu.fails(moult.ERR_UNSUPPORTED, "device: cuda", lambda: host.run(x, logits=logits))


def main():
    if torch is None or not torch.cuda.is_available():
        print("skip: " + ("no torch" if torch is None else "torch finds no GPU"))
        return int("MOULT_NEED_GPU" in os.environ)
    torch.zeros(1, device="cuda")
    failed, names = 0, sys.argv[1:] or [n for n in globals() if n.startswith("test_")]
    for name in names:
        try:
            globals()[name]()
            print("ok " + name, flush=True)
        except Exception:
            failed += 1
            print("FAILED " + name)
            traceback.print_exc()
    print(f"{len(names) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
