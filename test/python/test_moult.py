"""python/moult.py against float64 numpy: formats, forms, routing, errors, packing, and the trtllm layouts
against FlashInfer's own index functions.

    python test/python/test_moult.py [name ...]

Weights are random codes decoded here by the formats' public tables.  FlashInfer: an installed package, or
the path of its wheel in FLASHINFER_WHEEL; its index functions are read from its source and run on torch, or
on the few array operations that they use in numpy.  Without it those tests say that they are skipped.
"""
import ast
import glob
import importlib.util
import os
import sys
import traceback
import types
import zipfile

import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "python"))
import moult  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])


def e4m3(code):
    code = np.asarray(code, np.uint8).astype(int)
    e, m, s = code >> 3 & 15, code & 7, 1 - 2. * (code >> 7)
    return s * np.where(e == 0, m * 2. ** -9, (8 + m) * 2. ** (e - 10))


def e8m0(code):
    return 2. ** (np.asarray(code).astype(int) - 127)


def bf16_bits(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7fff + (u >> 16 & 1)) >> 16).astype(np.uint16)


def bf16(bits):
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def round_bf16(x):
    return bf16(bf16_bits(np.asarray(x, np.float32))).astype(np.float64)


def groups(scale, rows, cols, group_rows, group_cols):
    return np.repeat(np.repeat(scale, group_rows, 0), group_cols, 1)[:rows, :cols]


class Matrix:
    """Random canonical bytes of a format, and their float64 values."""

    def __init__(self, rng, format, rows, cols, spread=1.0):
        self.tensor, size = None, spread / cols ** .5
        if format == "bf16":
            self.data = bf16_bits(rng.normal(0, size, (rows, cols)))
            self.scale, self.value = None, bf16(self.data).astype(np.float64)
            return
        if format in ("nvfp4", "mxfp4"):
            codes = rng.integers(0, 16, (rows, cols)).astype(np.uint8)
            self.data = codes[:, 0::2] | codes[:, 1::2] << 4
            value = E2M1[codes]
        else:
            self.data = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
            self.data[self.data & 0x7f == 0x7f] = 0x7e  # no NaN
            value = e4m3(self.data) / 100
        g = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}.get(format)
        if format == "nvfp4":
            self.scale = rng.integers(0x30, 0x48, (rows, -(-cols // g))).astype(np.uint8)
            self.tensor = np.float32(size * rng.uniform(.1, .3))
            self.value = value * groups(e4m3(self.scale), rows, cols, 1, g) * float(self.tensor)
        elif g:
            k = int(np.log2(size)) - 1 - (format == "mxfp8") * 6
            self.scale = (127 + k + rng.integers(-1, 2, (rows, -(-cols // g)))).astype(np.uint8)
            self.value = value * (100 if format == "mxfp8" else 1) * groups(e8m0(self.scale), rows, cols, 1, g)
        else:
            shape, gr, gc = {"fp8-block": ((-(-rows // 128), -(-cols // 128)), 128, 128),
                             "fp8-channel": ((rows, 1), 1, cols), "fp8-tensor": ((1, 1), rows, cols)}[format]
            self.scale = (size / 100 * rng.uniform(.5, 1.5, shape)).astype(np.float32)
            self.value = value * 100 * groups(self.scale.astype(np.float64), rows, cols, gr, gc)


def stack(format, ms):
    return moult.Matrices(format, np.stack([m.data for m in ms]),
                          None if ms[0].scale is None else np.stack([m.scale for m in ms]),
                          None if ms[0].tensor is None else np.array([m.tensor for m in ms], np.float32))


def silu_up(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def oai_up(gate, up, alpha=np.float64(np.float32(1.702)), beta=1.0, limit=7.0):
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + beta)


def layer(x, ids, w, experts, first=0, act=silu_up, bias=None):
    """float64; also the sum of absolute products, for the tolerance."""
    y, size = np.zeros(x.shape), np.zeros(x.shape)
    for t in range(len(x)):
        for i, weight in zip(ids[t], w[t]):
            if not first <= i < first + len(experts):
                continue
            g, u, d = (m.value for m in experts[i - first])
            b = [0, 0, 0] if bias is None else [v[i - first].astype(np.float64) for v in bias]
            h = act(g @ x[t] + b[0], u @ x[t] + b[1])
            y[t] += weight * (d @ h + b[2])
            size[t] += abs(weight) * (abs(d) @ abs(h) + abs(b[2]))
    return y, size


def close(y, expect, size):
    """Two BF16 roundings on the way, 2^-8 each at worst, and much less on average."""
    off = abs(np.asarray(y, np.float64) - expect) / (size + 1e-30)
    assert y.shape == expect.shape and off.max() <= 2. ** -7 and (off ** 2).mean() ** .5 <= 2. ** -9, \
        (off.max(), (off ** 2).mean() ** .5)


FORMATS = ["bf16", "fp8-block", "fp8-tensor", "fp8-channel", "mxfp8", "nvfp4", "mxfp4"]


def rig(rng, format, hidden=64, inner=48, experts=8):
    ms = [[Matrix(rng, format, inner, hidden, 1.5), Matrix(rng, format, inner, hidden, .8),
           Matrix(rng, format, hidden, inner)] for _ in range(experts)]
    return ms, dict(gate=stack(format, [m[0] for m in ms]), up=stack(format, [m[1] for m in ms]),
                    down=stack(format, [m[2] for m in ms]))


def choices(rng, tokens, experts, k):
    ids = np.array([rng.permutation(experts)[:k] for _ in range(tokens)], np.int32)
    return ids, rng.uniform(0, 1, (tokens, k)).astype(np.float32)


def test_formats():
    rng = np.random.default_rng(1)
    for f in FORMATS:
        for hidden, inner in ((64, 48), (2880, 32), (96, 144)):
            ms, w = rig(rng, f, hidden, inner)
            x = round_bf16(rng.normal(0, 1, (5, hidden)))
            ids, weights = choices(rng, 5, 8, 3)
            moe = moult.Moe(hidden, inner, 8, 3, num_threads=2)
            moe.set_weights(**w)
            y = moe.run(x.astype(np.float32), topk_ids=ids, topk_weights=weights)
            close(y, *layer(x, ids, round_bf16(weights), ms))
            packed = ids << 16 | bf16_bits(weights).astype(np.int32)
            assert (moe.run(x.astype(np.float32), packed=packed) == y).all()
            moe.close()


def test_routing():
    """Fused against routed with float64's own choices."""
    rng = np.random.default_rng(2)
    ms, w = rig(rng, "bf16", experts=16)
    logits = rng.permuted(np.linspace(-3, 3, 16 * 6).reshape(6, 16), axis=1).astype(np.float32)
    x, s = round_bf16(rng.normal(0, 1, (6, 64))), 1 / (1 + np.exp(-logits.astype(np.float64)))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(1, keepdims=True)
    bias = rng.uniform(0, 1, 16).astype(np.float32)

    def pick(key, weight, k, norm=1.0):
        ids = np.argsort(-key, axis=1, kind="stable")[:, :k]
        c = np.take_along_axis(weight, ids, 1)
        return ids.astype(np.int32), c * norm / c.sum(1, keepdims=True) if norm else c

    def grouped(k):
        b = (s + bias).reshape(6, 4, 4)
        score = np.sort(b, axis=2)[:, :, 2:].sum(2)
        kept = np.argsort(-score, axis=1, kind="stable")[:, :2]
        keep = np.zeros((6, 4), bool)
        np.put_along_axis(keep, kept, True, 1)
        return np.where(keep[:, :, None], b, -np.inf).reshape(6, 16)

    for method, k, fields, args, (ids, weights) in (
            (moult.ROUTE_DEFAULT, 4, {}, {}, pick(p, p, 4, 0)),
            (moult.ROUTE_RENORMALIZE, 4, {}, {}, pick(p, p, 4)),
            (moult.ROUTE_RENORMALIZE_NAIVE, 4, {}, {}, pick(p, p, 4)),
            (moult.ROUTE_TOPK, 4, {}, {}, pick(logits, logits.astype(np.float64), 4, 0)),
            (moult.ROUTE_SIGMOID, 4, {}, {}, pick(s, s, 4, 0)),
            (moult.ROUTE_TOPK_SIGMOID, 4, {}, {}, pick(s, s, 4, 0)),
            (moult.ROUTE_SIGMOID_RENORM, 4, {"norm_topk_prob": 1}, {}, pick(s, s, 4)),
            (moult.ROUTE_MINIMAX2, 4, {"routed_scaling_factor": 1.5}, {"routing_bias": bias},
             pick(s + bias, s, 4, 1.5)),
            (moult.ROUTE_DEEPSEEK_V3, 4, {"routed_scaling_factor": 2.5, "n_group": 4, "topk_group": 2},
             {"routing_bias": bias}, pick(grouped(4), s, 4, 2.5))):
        moe = moult.Moe(64, 48, 16, k, routing_method=method, num_threads=2, **fields)
        moe.set_weights(**w)
        replay, packed = np.zeros((6, k), np.int16), np.zeros((6, k), np.int32)
        y = moe.run(x.astype(np.float32), logits=logits, replay_out=replay, packed_out=packed, **args)
        assert (replay == ids).all(), method
        got = bf16((packed & 0xffff).astype(np.uint16)).astype(np.float64)
        assert (abs(got - weights) <= 2. ** -8 * abs(weights)).all(), method
        close(y, *layer(x, ids, got, ms))
        assert (moe.run(x.astype(np.float32), packed=packed) == y).all()
        assert (moe.run(x.astype(np.float32), logits=logits, replay_ids=replay, **args) == y).all()


def test_arrangements():
    """Every way to hand over gate and up gives the same bits; so does packing them oneself."""
    rng = np.random.default_rng(3)
    for f in FORMATS:
        inner = 128 if f == "fp8-block" else 48
        ms, w = rig(rng, f, 64, inner, 4)
        if f == "fp8-tensor":  # one scale for the pair
            for m in ms:
                m[1].value *= float(m[0].scale[0, 0]) / float(m[1].scale[0, 0])
                m[1].scale = m[0].scale
            w["up"] = stack(f, [m[1] for m in ms])
        bias = [rng.normal(0, .2, (4, n)).astype(np.float32) for n in (inner, inner, 64)]
        x = bf16_bits(rng.normal(0, 1, (7, 64)))
        ids, weights = choices(rng, 7, 4, 2)

        def run(**weights_of):
            moe = moult.Moe(64, inner, 4, 2, num_threads=2)
            moe.set_weights(down_bias=bias[2], **weights_of)
            return moe.run(x, topk_ids=ids, topk_weights=weights, output_dtype="f32")

        y = run(gate_bias=bias[0], up_bias=bias[1], **w)
        close(y, *layer(bf16(x).astype(np.float64), ids, round_bf16(weights), ms, bias=bias))

        def fused(arrange, a, b):
            def join(u, v):
                if arrange == moult.FUSED_INTERLEAVED:
                    return np.stack([u, v], 2).reshape(len(u), -1, *u.shape[2:])
                return np.concatenate([u, v], 1)
            scale = w["gate"].scale
            if scale is not None and f != "fp8-tensor":
                scale = join(w[a].scale, w[b].scale)
            t = w["gate"].tensor_scale
            m = moult.Matrices(f, join(w[a].data, w[b].data), scale,
                               None if t is None else np.stack([t, w["up"].tensor_scale], 1))
            pair = dict(gate=bias[0], up=bias[1])
            return run(gate=m, down=w["down"], arrangement=arrange, gate_bias=join(pair[a], pair[b]))

        assert (fused(moult.FUSED_GATE_UP, "gate", "up") == y).all()
        assert (fused(moult.FUSED_UP_GATE, "up", "gate") == y).all()
        if f == "fp8-block":
            fails(moult.ERR_INPUT, "interleaved", lambda: fused(moult.FUSED_INTERLEAVED, "gate", "up"))
        else:
            assert (fused(moult.FUSED_INTERLEAVED, "gate", "up") == y).all()
        shapes = [(inner, 64), (inner, 64), (64, inner)]
        resident = [[moult.pack(f, *s, m.data, m.scale, m.tensor, .5 if f != "bf16" else None)
                     for m, s in zip(e, shapes)] for e in ms]
        assert (run(arrangement=moult.RESIDENT, resident=resident, gate_bias=bias[0], up_bias=bias[1],
                    **{n: moult.Matrices(f, None) for n in w}) == y).all()
        for m, s, r in zip(ms[0], shapes, resident[0]):
            data, scale, tensor, scale_in = moult.unpack(f, *s, r)
            assert data.tobytes() == m.data.tobytes()
            assert m.scale is None or scale.tobytes() == m.scale.tobytes()
            assert (m.tensor is None) == np.isnan(tensor) and (m.tensor is None or tensor == m.tensor)
            assert f == "bf16" or scale_in == .5


def test_slices_and_chunks():
    """Slices of experts add up; more tokens than max_tokens, in the same bits; replay of foreign ids."""
    rng = np.random.default_rng(4)
    ms, w = rig(rng, "mxfp4", 64, 64, 8)
    x = rng.normal(0, 1, (37, 64)).astype(np.float32)
    ids, weights = choices(rng, 37, 8, 3)
    ids[5] = [-1, 3, 3]
    ids[6] = [-1, 8, 900]
    whole = moult.Moe(64, 64, 8, 3, num_threads=2)
    whole.set_weights(**w)
    y = whole.run(x, topk_ids=ids, topk_weights=weights)
    close(y, *layer(round_bf16(x), ids, round_bf16(weights), ms))
    assert (y[6] == 0).all()
    small = moult.Moe(64, 64, 8, 3, num_threads=1, max_tokens=4, isa="portable")
    small.set_weights(**w)
    assert (small.run(x, topk_ids=ids, topk_weights=weights) == y).all()
    total = np.zeros_like(y)
    for first, n in ((0, 3), (3, 4), (7, 1)):
        part = moult.Moe(64, 64, 8, 3, local_expert_offset=first, local_num_experts=n)
        part.set_weights(**{k: moult.Matrices(m.format, m.data[first:first + n], m.scale[first:first + n])
                            for k, m in w.items()})
        got = part.run(x, topk_ids=ids, topk_weights=weights)
        close(got, *layer(round_bf16(x), ids, round_bf16(weights), ms[first:first + n], first))
        total += got
    assert np.allclose(total, y, rtol=1e-5, atol=1e-6)
    assert whole.run(x[:0], topk_ids=ids[:0], topk_weights=weights[:0]).shape == (0, 64)


def test_activations():
    rng = np.random.default_rng(5)
    ms, w = rig(rng, "bf16")
    x = round_bf16(rng.normal(0, 8, (6, 64)))
    ids, weights = choices(rng, 6, 8, 2)
    moe = moult.Moe(64, 48, 8, 2, activation=moult.SWIGLU_OAI)
    moe.set_weights(**w)
    close(moe.run(x.astype(np.float32), topk_ids=ids, topk_weights=weights),
          *layer(x, ids, round_bf16(weights), ms, act=oai_up))
    moe.set_weights(limit=np.full(8, .5, np.float32), beta=np.zeros(8, np.float32),
                    alpha=np.ones(8, np.float32), **w)
    close(moe.run(x.astype(np.float32), topk_ids=ids, topk_weights=weights),
          *layer(x, ids, round_bf16(weights), ms, act=lambda g, u: oai_up(g, u, 1, 0, .5)))
    one = moult.Moe(64, 48, 8, 1, routing_method=moult.ROUTE_LLAMA4)
    one.set_weights(**w)
    logits = rng.normal(0, 1, (6, 8)).astype(np.float32)
    ids = logits.argmax(1)[:, None]
    score = round_bf16(1 / (1 + np.exp(-logits.max(1).astype(np.float64))))[:, None]
    close(one.run(x.astype(np.float32), logits=logits), *layer(round_bf16(x * score), ids, score ** 0, ms))


def test_activation_formats():
    """MXFP8 rows: E4M3 with a power of two each 32, in float64."""
    rng = np.random.default_rng(6)
    ms, w = rig(rng, "mxfp8", 64, 64)
    x = round_bf16(rng.normal(0, 1, (8, 64)))
    ids, weights = choices(rng, 8, 8, 2)
    moe = moult.Moe(64, 64, 8, 2, activation_format=moult.ACT_MXFP8)
    moe.set_weights(**w)
    y = moe.run(x.astype(np.float32), topk_ids=ids, topk_weights=weights)
    table = np.unique(e4m3(np.array([c for c in range(256) if c & 0x7f != 0x7f])))
    even = {v: c & 1 == 0 for c in range(256) if c & 0x7f != 0x7f for v in [float(e4m3(c))]}

    def nearest(v):
        d = abs(table - v)
        best = np.flatnonzero(d == d.min())
        return table[best[0]] if len(best) == 1 or even[float(table[best[0]])] else table[best[1]]

    def mx(v):
        out = v.copy()
        for r in out.reshape(-1, 32):
            s = 2. ** np.ceil(np.log2(abs(r).max() / 448))
            r[:] = [nearest(q) * s for q in r / s]
        return out

    expect, size = layer(mx(x), ids, round_bf16(weights), ms, act=lambda g, u: mx(round_bf16(silu_up(g, u))))
    plain, _ = layer(x, ids, round_bf16(weights), ms)
    assert ((y - expect) ** 2).mean() * 16 < ((y - plain) ** 2).mean()
    fp4 = moult.Moe(64, 64, 8, 2, activation_format=moult.ACT_NVFP4)
    _, nv = rig(rng, "nvfp4", 64, 64)
    fails(moult.ERR_INPUT, "nvfp4-per-token", lambda: fp4.set_weights(**nv))
    for m in nv.values():
        m.input_scale = np.full(8, .001, np.float32)
    fp4.set_weights(**nv)


def fails(code, text, f):
    try:
        f()
    except moult.Error as e:
        assert e.code == code and text in str(e), (e.code, str(e))
        return
    raise AssertionError("no error: " + text)


def test_errors():
    rng = np.random.default_rng(7)
    new = moult.Moe
    fails(moult.ERR_INPUT, "num_experts", lambda: new(64, 48, 6, 2))
    fails(moult.ERR_INPUT, "top_k", lambda: new(64, 48, 8, 8))
    fails(moult.ERR_INPUT, "hidden_size", lambda: new(63, 48, 8, 2))
    fails(moult.ERR_INPUT, "routing_method", lambda: new(64, 48, 8, 2, routing_method=10))
    fails(moult.ERR_INPUT, "activation_format", lambda: new(64, 48, 8, 2, activation_format=9))
    fails(moult.ERR_INPUT, "local_expert", lambda: new(64, 48, 8, 2, local_expert_offset=4, local_num_experts=5))
    if torch is None or not torch.cuda.is_available():
        fails(moult.ERR_UNSUPPORTED, "CUDA", lambda: new(64, 48, 8, 2, device=moult.DEVICE_CUDA))
    fails(moult.ERR_UNSUPPORTED, "isa", lambda: new(64, 48, 8, 2, isa="sse2"))
    ms, w = rig(rng, "nvfp4")
    moe = new(64, 48, 8, 2)
    x, (ids, weights) = np.ones((3, 64), np.float32), choices(rng, 3, 8, 2)
    fails(moult.ERR_STATE, "weights", lambda: moe.run(x, topk_ids=ids, topk_weights=weights))
    moe.set_weights(**w)
    y = moe.run(x, topk_ids=ids, topk_weights=weights)
    for field, at, value, text in (("scale", (5, 1, 2), 0x7f, "expert 5, up: scale[6]"),
                                   ("scale", (5, 1, 2), 0x81, "expert 5, up: scale[6]"),
                                   ("tensor_scale", 2, np.nan, "expert 2, up: tensor_scale")):
        bad = {n: moult.Matrices(m.format, m.data, m.scale.copy(), m.tensor_scale.copy()) for n, m in w.items()}
        getattr(bad["up"], field)[at] = value
        fails(moult.ERR_INPUT, text, lambda: moe.set_weights(**bad))
    assert (moe.run(x, topk_ids=ids, topk_weights=weights) == y).all()  # the former weights stay
    _, b = rig(rng, "bf16")
    b["down"].data[1, 7, 3] = 0x7fc0
    fails(moult.ERR_INPUT, "expert 1, down: data[7][3]", lambda: moe.set_weights(**b))
    fails(moult.ERR_INPUT, "logits, packed, topk_ids", lambda: moe.run(x))
    fails(moult.ERR_INPUT, "topk_weights", lambda: moe.run(x, topk_ids=ids))
    fails(moult.ERR_INPUT, "routing_bias", lambda: moe.run(x, topk_ids=ids, topk_weights=weights,
                                                         routing_bias=np.ones(8, np.float32)))
    fails(moult.ERR_INPUT, "routing_bias", lambda: moe.run(x, logits=np.ones((3, 8), np.float32),
                                                         routing_bias=np.ones(8, np.float32)))
    fails(moult.ERR_INPUT, "shape", lambda: moe.run(x, logits=np.ones((3, 7), np.float32)))
    c = moult._Config(size=8)
    fails(moult.ERR_INPUT, "size", lambda: moult._call(moult._lib.moult_moe_create, moult.ctypes.byref(moult.ptr()),
                                                     moult.ctypes.byref(c)))

    class Later(moult.ctypes.Structure):  # a caller compiled against a later header
        _fields_ = [("now", moult._Config), ("further", moult.i64)]

    later = Later(now=moult._Config(hidden_size=64, intermediate_size=48, num_experts=8, top_k=2))
    later.now.size = moult.ctypes.sizeof(Later)

    def create(handle):
        moult._call(moult._lib.moult_moe_create, moult.ctypes.byref(handle),
                    moult.ctypes.cast(moult.ctypes.byref(later), moult.ctypes.POINTER(moult._Config)))

    handle = moult.ptr()
    create(handle)
    moult._lib.moult_moe_destroy(handle)
    later.further = 1
    fails(moult.ERR_UNSUPPORTED, "size", lambda: create(moult.ptr()))


def as_torch(a):
    """A numpy array as the tensor that a caller of torch would hold: BF16 bits become bfloat16."""
    if a is None:
        return None
    return torch.from_numpy(a.view(np.int16)).view(torch.bfloat16) if a.dtype == np.uint16 else torch.from_numpy(a)


def test_torch():
    """Every way in: each gives the bits that numpy gives."""
    if torch is None:
        return print("skip    test_torch: torch is not installed")
    rng = np.random.default_rng(8)
    for f in ("bf16", "fp8-block", "fp8-tensor", "fp8-channel", "mxfp8", "nvfp4", "mxfp4"):
        ms, w = rig(rng, f)
        x = torch.from_numpy(rng.normal(0, 1, (4, 64)).astype(np.float32)).to(torch.bfloat16)
        bits = x.view(torch.int16).numpy().view(np.uint16)
        ids, weights = choices(rng, 4, 8, 2)
        moe, other = (moult.Moe(64, 48, 8, 2, routing_method=moult.ROUTE_RENORMALIZE) for _ in range(2))
        other.set_weights(**w)
        moe.set_weights(**{n: moult.Matrices(m.format, as_torch(m.data), as_torch(m.scale), as_torch(m.tensor_scale))
                           for n, m in w.items()})
        y = moe.run(x, topk_ids=torch.from_numpy(ids), topk_weights=torch.from_numpy(weights))
        want = other.run(bits, topk_ids=ids, topk_weights=weights)
        assert y.dtype == torch.bfloat16 and (y.view(torch.int16).numpy().view(np.uint16) == want).all(), f
        close(y.float().numpy(), *layer(x.double().numpy(), ids, round_bf16(weights), ms))
        logits = torch.randn(4, 8).to(torch.bfloat16)
        packed_out, replay_out = np.empty((4, 2), np.int32), np.empty((4, 2), np.int16)
        fused = moe.run(x, logits=logits, packed_out=packed_out, replay_out=replay_out)
        assert torch.equal(fused, moe.run(x, logits=logits.float()))
        assert torch.equal(fused, moe.run(x, packed=torch.from_numpy(packed_out)))
        assert torch.equal(fused, moe.run(x, logits=logits, replay_ids=torch.from_numpy(replay_out)))
        assert (packed_out >> 16 == replay_out).all()
        # float32, a strided view, a leaf with a gradient
        wide = torch.zeros(4, 128)
        wide[:, ::2] = x.float()
        plain = moe.run(x.float(), logits=logits)
        assert plain.dtype == torch.float32 and torch.equal(plain, moe.run(wide[:, ::2], logits=logits))
        assert torch.equal(plain, moe.run(x.float().requires_grad_(), logits=logits))
        assert torch.equal(moe.run(x.float(), logits=logits, output_dtype="bf16"), fused)
        if f == "nvfp4":
            m = w["up"]
            got = moult.pack(f, 48, 64, as_torch(m.data[3]), as_torch(m.scale[3]), torch.tensor([m.tensor_scale[3]]))
            assert (got == moult.pack(f, 48, 64, m.data[3], m.scale[3], m.tensor_scale[3:4])).all()
    fails(moult.ERR_UNSUPPORTED, "device: meta", lambda: moe.run(x.to("meta"), logits=logits))
    fails(moult.ERR_INPUT, "dtype: float64", lambda: moe.run(x.double(), logits=logits))
    fails(moult.ERR_INPUT, "dtype: float16", lambda: moe.run(x, logits=logits.half()))
    fails(moult.ERR_INPUT, "dtype: int64", lambda: moe.run(x, topk_ids=torch.from_numpy(ids).long(), topk_weights=weights))
    fails(moult.ERR_INPUT, "shape", lambda: moe.run(x, logits=logits[:, :7]))


# FlashInfer's layouts

class Shim(np.ndarray):
    """What the index functions use of torch.Tensor."""
    device = None

    def dim(self):
        return self.ndim

    def to(self, *_):
        return self

    def contiguous(self):
        return np.ascontiguousarray(self).view(Shim)

    def permute(self, *axes):
        return self.transpose(axes)

    def view(self, *shape):
        if len(shape) == 1 and not isinstance(shape[0], int):
            return super().view(shape[0])
        return self.reshape(shape)


def shim_torch():
    t = types.SimpleNamespace(Tensor=Shim, long=np.int64, int64=np.int64, uint8=np.uint8, bfloat16=np.float16,
                              dtype=np.dtype)
    t.arange = lambda n, dtype=None, device=None: np.arange(n, dtype=dtype).view(Shim)
    t.tensor = lambda v, dtype=None: np.array(v, dtype).view(Shim)
    t.empty = lambda n, dtype=None: np.empty(n, dtype).view(Shim)
    t.empty_like = lambda v: np.empty_like(v)
    t.meshgrid = lambda *v, indexing=None: [g.view(Shim) for g in np.meshgrid(*v, indexing=indexing)]
    return t


def flashinfer():
    """Its index functions by name, or None."""
    spec = importlib.util.find_spec("flashinfer")
    wheel = os.environ.get("FLASHINFER_WHEEL")
    wheel = wheel or next(iter(glob.glob("build/flashinfer_python-*.whl")), None)
    if spec:
        read = lambda name: open(os.path.join(os.path.dirname(spec.origin), name)).read()  # noqa: E731
    elif wheel:
        z = zipfile.ZipFile(wheel)
        read = lambda name: z.read("flashinfer/" + name).decode()  # noqa: E731
    else:
        return None
    wanted = {"utils.py": ["srcToDstBlk16RowMap", "srcToDstBlk32RowMap", "get_shuffle_block_size",
                           "get_shuffle_matrix_a_row_indices", "get_shuffle_matrix_sf_a_row_indices"],
              "fused_moe/core.py": ["get_reorder_rows_for_gated_act_gemm_row_indices", "convert_to_block_layout"],
              "gemm/gemm_bf16_fp4.py": ["_unswizzle_sf_128x4"]}
    space = {"torch": torch or shim_torch(), "__builtins__": __builtins__}
    for file, names in wanted.items():
        for node in ast.parse(read(file)).body:
            name = getattr(node, "name", None)
            if isinstance(node, ast.Assign):
                name = getattr(node.targets[0], "id", None)
            if name in names:
                node.decorator_list = [] if isinstance(node, ast.FunctionDef) else None
                exec(compile(ast.Module([node], []), file, "exec"), space)  # nosec: the package's own text
        assert all(n in space for n in names), (file, names)
    return space


def tensor(x):
    return torch.from_numpy(np.ascontiguousarray(x)) if torch else np.ascontiguousarray(x).view(Shim)


def test_trtllm():
    fi = flashinfer()
    if fi is None:
        return print("skip    test_trtllm: no flashinfer package; FLASHINFER_WHEEL may name its wheel")
    rng = np.random.default_rng(9)
    for f in ("bf16", "nvfp4", "mxfp4", "mxfp8", "fp8-tensor", "fp8-block"):
        block = f == "fp8-block"
        tile, hidden, inner = 64 if block else 128, 256, 128
        for w13 in (True, False):
            rows, cols = (inner, hidden) if w13 else (hidden, inner)
            which = moult.TRTLLM_W13 if w13 else moult.TRTLLM_W2
            row = moult.canonical_bytes(f, rows, cols)[0] // rows
            half = [rng.integers(0, 256, (rows, row)).astype(np.uint8) for _ in range(1 + w13)]  # gate, up
            whole = tensor(np.concatenate(half[::-1]))  # [up; gate]
            map1 = fi["get_shuffle_matrix_a_row_indices"](whole, tile)
            order = map1
            if w13 and not block:
                order = fi["get_reorder_rows_for_gated_act_gemm_row_indices"](whole)[map1]
            expect = whole[order]
            got = moult.trtllm_export(f, which, moult.PART_DATA, rows, cols, *half)
            assert got.tobytes() == np.asarray(expect).tobytes(), f
            back = moult.trtllm_import(f, which, moult.PART_DATA, rows, cols, got)
            assert all((b == h.ravel()).all() for b, h in zip(back, half))
            if row % 128 == 0:
                got = moult.trtllm_export(f, which, moult.PART_DATA, rows, cols, *half, block_major=True)
                assert got.tobytes() == np.asarray(fi["convert_to_block_layout"](expect, 128)).tobytes(), f
                back = moult.trtllm_import(f, which, moult.PART_DATA, rows, cols, got, block_major=True)
                assert all((b == h.ravel()).all() for b, h in zip(back, half))
            bias = [rng.normal(size=rows).astype(np.float32) for _ in half]
            got = moult.trtllm_export(f, which, moult.PART_BIAS, rows, cols, *bias)
            joined = tensor(np.concatenate(bias[::-1]))
            assert got.tobytes() == np.asarray(joined[order]).tobytes()
            scales(fi, rng, f, which, rows, cols, tile)
    assert moult.trtllm_export("mxfp8", 1, 1, 160, 96, np.full((160, 3), 7, np.uint8)).size == 2 * 512


def scales(fi, rng, f, which, rows, cols, tile):
    if f in ("bf16", "fp8-tensor"):
        fails(moult.ERR_INPUT, "part", lambda: moult.trtllm_export(f, which, moult.PART_SCALE, rows, cols, None))
        return
    w13 = which == moult.TRTLLM_W13
    if f == "fp8-block":
        grids = [rng.normal(size=(rows // 128, cols // 128)).astype(np.float32) for _ in range(1 + w13)]
        got = moult.trtllm_export(f, which, moult.PART_SCALE, rows, cols, *grids)
        assert got.tobytes() == np.concatenate(grids[::-1]).tobytes()
        back = moult.trtllm_import(f, which, moult.PART_SCALE, rows, cols, got)
        assert all(b.tobytes() == g.tobytes() for b, g in zip(back, grids))
        return
    n = -(-cols // (16 if f == "nvfp4" else 32))
    half = [rng.integers(0, 256, (rows, n)).astype(np.uint8) for _ in range(1 + w13)]
    whole = tensor(np.concatenate(half[::-1]))
    order = fi["get_shuffle_matrix_sf_a_row_indices"](whole, tile)
    if w13:
        order = fi["get_reorder_rows_for_gated_act_gemm_row_indices"](whole)[order]
    got = moult.trtllm_export(f, which, moult.PART_SCALE, rows, cols, *half)
    linear = fi["_unswizzle_sf_128x4"](tensor(got), len(whole), n)
    assert np.asarray(linear).tobytes() == np.asarray(whole[order]).tobytes(), f
    back = moult.trtllm_import(f, which, moult.PART_SCALE, rows, cols, got)
    assert all((b == h.ravel()).all() for b, h in zip(back, half))


def test_trtllm_refusals():
    x = np.zeros(1 << 16, np.uint8)
    export = moult.trtllm_export
    fails(moult.ERR_UNSUPPORTED, "fp8-channel", lambda: export("fp8-channel", 0, 0, 128, 128, x, x))
    fails(moult.ERR_INPUT, "rows", lambda: export("bf16", 1, 0, 40, 64, x))
    fails(moult.ERR_INPUT, "block_major", lambda: export("nvfp4", 1, 0, 64, 64, x, block_major=True))
    fails(moult.ERR_INPUT, "rows", lambda: export("fp8-block", 0, 1, 64, 128, x, x))
    fails(moult.ERR_INPUT, "gate, stored, up", lambda: export("bf16", 0, 0, 64, 64, x[:8192]))


def main():
    names = sys.argv[1:] or sorted(n for n in globals() if n.startswith("test_"))
    failed = 0
    for name in names:
        try:
            globals()[name]()
            print("ok     ", name)
        except Exception:
            failed += 1
            traceback.print_exc()
            print("FAILED ", name)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
