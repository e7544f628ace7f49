"""Quantized checkpoints, read and rounded by numpy: an oracle written from the public definitions.

read(folder) gives {tensor: array of raw numbers}; weights(folder) gives {Hugging Face name: float64
matrix} whatever the format and spelling; expected(x, format, rule, amax) gives the values that a rule
must produce, in float64 with one rounding to float32 an operation.  Shares nothing with the program.
"""
import glob
import json
import os
import struct

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([(m / 8 * 2.0 ** -6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7))
                 for e in range(16) for m in range(8)][:127])
SIZES = {"BF16": "<u2", "F32": "<f4", "F16": "<f2", "U8": "u1", "F8_E4M3": "u1", "F8_E8M0": "u1"}


def read(folder):
    """{name: (dtype, array)}"""
    out = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.safetensors"))):
        with open(path, "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            start = f.tell()
            data = f.read()
        assert start % 8 == 0, path
        end = 0
        for name, t in sorted(header.items(), key=lambda x: x[1].get("data_offsets", [0])[0]):
            if name == "__metadata__":
                continue
            begin, stop = t["data_offsets"]
            kind = np.dtype(SIZES[t["dtype"]])
            assert begin == end and begin % kind.itemsize == 0, (name, begin, end)
            end = stop
            assert name not in out
            out[name] = (t["dtype"], np.frombuffer(data, kind, (stop - begin) // kind.itemsize,
                                                   begin).reshape(t["shape"]))
        assert end == len(data), path
    return out


def bf16(a):
    return (a.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def to_bf16(x):
    """float32 -> bits, nearest even; finite."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + (u >> 16 & 1)) >> 16).astype(np.uint16)


def e4m3(codes):
    assert not ((codes & 0x7F) == 0x7F).any()
    return np.where(codes & 0x80, -1.0, 1.0) * E4M3[codes & 0x7F]


def number(t):
    kind, a = t
    return bf16(a) if kind == "BF16" else a.astype(np.float64)


def nibbles(a):
    codes = np.stack([a & 15, a >> 4], -1).reshape(a.shape[0], -1)
    return np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]


def spread(scale, rows, cols, group):
    return np.repeat(np.repeat(scale, group[0], 0), group[1], 1)[:rows, :cols]


def decode(t, module):
    """(float64 matrix, format) of a module."""
    kind, data = t.get(module + ".weight_packed") or t[module + ".weight"]
    scale = t.get(module + ".weight_scale_inv") or t.get(module + ".weight_scale")
    if scale is None:
        assert kind == "BF16", (module, kind)
        return bf16(data), "bf16"
    if kind == "U8":
        x = nibbles(data)
        rows, cols = x.shape
        if scale[0] == "F8_E4M3":
            if module + ".weight_scale_2" in t:
                tensor = number(t[module + ".weight_scale_2"]).reshape(())
            else:
                tensor = np.float64(np.float32(1) / np.float32(
                    t[module + ".weight_global_scale"][1].reshape(())))
            return x * spread(e4m3(scale[1]), rows, cols, (1, 16)) * tensor, "nvfp4"
        return x * spread(2.0 ** (scale[1].astype(np.float64) - 127), rows, cols, (1, 32)), "mxfp4"
    assert kind == "F8_E4M3", (module, kind)
    x = e4m3(data)
    rows, cols = x.shape
    if scale[0] in ("U8", "F8_E8M0"):
        return x * spread(2.0 ** (scale[1].astype(np.float64) - 127), rows, cols, (1, 32)), "mxfp8"
    s = number(scale)
    if s.size == 1 and not (rows <= 128 and cols <= 128 and s.ndim == 2):
        return x * s.reshape(()), "fp8-tensor"
    if s.ndim == 1 or s.shape == (rows, 1) and rows > 1:
        return x * s.reshape(-1, 1), "fp8-channel"
    assert s.shape == (-(-rows // 128), -(-cols // 128)), (module, s.shape)
    return x * spread(s, rows, cols, (128, 128)), "fp8-block"


def modules(t):
    tails = (".weight_packed", ".weight")
    return sorted({n[:-len(e)] for n in t for e in tails if n.endswith(e)})


def weights(folder):
    t = read(folder)
    return {m: decode(t, m) for m in modules(t)}


# ---- rules ----

def f32(x):
    return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def nearest(grid, x):
    """Values of `grid` nearest to |x|, ties to the even index, saturating, with x's sign."""
    a = np.abs(x)
    i = np.clip(np.searchsorted(grid, a), 1, len(grid) - 1)
    low, high = grid[i - 1], grid[i]
    mid = (low + high) / 2
    up = (a > mid) | ((a == mid) & (i % 2 == 0))
    v = np.where(up, high, low)
    return np.where(a >= grid[-1], grid[-1], v) * np.sign(x)


def block_amax(x, group):
    rows, cols = x.shape
    r, c = group[0] or rows, group[1] or cols
    a = np.abs(x)
    a = np.pad(a, ((0, -rows % r), (0, -cols % c)))
    a = a.reshape(a.shape[0] // r, r, a.shape[1] // c, c).max((1, 3))
    return a, (r, c)


def expected(x, fmt, rule, amax):
    """Decoded values after rounding x; amax: of what shares the tensor scale."""
    rows, cols = x.shape
    if fmt.startswith("fp8"):
        group = {"fp8-block": (128, 128), "fp8-channel": (1, 0), "fp8-tensor": (0, 0)}[fmt]
        a, group = block_amax(x, group)
        if fmt == "fp8-tensor":
            a = np.full((1, 1), amax)
        s = f32(a / 448)
        if rule == "amax-bf16":
            s = bf16(to_bf16(s))
        s = spread(np.where(s == 0, 1, s), rows, cols, group)
        return nearest(E4M3, f32(x / s)) * s
    if fmt.startswith("mx"):
        grid = E4M3 if fmt == "mxfp8" else E2M1
        a, group = block_amax(x, (1, 32))
        with np.errstate(divide="ignore"):
            up = np.ceil(np.log2(f32(a / grid[-1])))
            exact = np.floor(np.log2(np.where(a > 0, a, 1))) - (8 if fmt == "mxfp8" else 2)
        k = np.clip(up if rule == "round-up" else exact, -127, 127)
        s = spread(2.0 ** k, rows, cols, group)
        return nearest(grid, x / s) * s
    a, group = block_amax(x, (1, 16))
    if rule == "modelopt":
        t = f32(amax / 2688)
        s = f32(a / f32(6 * t))
        s = nearest(E4M3, np.maximum(np.where(s == 0, 1, s), 2.0 ** -9))
        return nearest(E2M1, f32(x / f32(spread(s, rows, cols, group) * t))) * \
            spread(s, rows, cols, group) * t
    g = f32(2688 / amax)
    t = f32(1 / g)
    if rule == "transformer-engine":
        s = spread(nearest(E4M3, f32(a * f32(g * f32(1 / 6)))), rows, cols, group)
        with np.errstate(divide="ignore"):
            m = np.minimum(f32(1 / f32(s * t)), np.finfo(np.float32).max.astype(np.float64))
        return nearest(E2M1, f32(x * m)) * s * t
    assert rule == "compressed-tensors", rule
    s = nearest(E4M3, f32(g * f32(a / 6)))
    s = spread(np.where(s == 0, 0.125, s), rows, cols, group)
    return nearest(E2M1, f32(x / f32(s / g))) * s * t
