"""Scalar codecs against ml_dtypes: every code decoded, and casts of ties, neighbours and random values.

usage: oracle_format.py PATH_OF_FORMATDUMP
"""
import subprocess
import sys

import ml_dtypes
import numpy as np


def main():
    tool = sys.argv[1]
    raw = subprocess.run([tool, "decode"], check=True, stdout=subprocess.PIPE).stdout
    ours = np.frombuffer(raw, np.float32)
    codes = np.arange(256, dtype=np.uint8)
    theirs = np.concatenate([
        codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32),
        codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32),
        codes[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32),
    ])
    same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
    assert same.all(), np.argwhere(~same)[:8]

    rng = np.random.default_rng(1)
    grid = np.concatenate([theirs[:127], theirs[512:520]]).astype(np.float64)
    grid = np.unique(grid)
    ties = ((grid[1:] + grid[:-1]) / 2).astype(np.float32)
    x = np.concatenate([
        ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(0)),
        grid.astype(np.float32),
        rng.standard_normal(300000).astype(np.float32) * np.float32(4),
        np.exp2(rng.uniform(-30, 9, 300000)).astype(np.float32),
        np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float32),
    ])
    x = np.concatenate([x, -x])
    x = x[np.isfinite(x)]
    raw = subprocess.run([tool, "encode"], input=x.tobytes(), check=True,
                         stdout=subprocess.PIPE).stdout
    got = np.frombuffer(raw, np.uint8).reshape(-1, 2)
    for column, kind, top in ((0, ml_dtypes.float8_e4m3fn, 448), (1, ml_dtypes.float4_e2m1fn, 6)):
        want = np.clip(x, -top, top).astype(kind).view(np.uint8)
        bad = got[:, column] != want
        assert not bad.any(), (kind, x[bad][:8], got[bad, column][:8], want[bad][:8])
    print(f"ml_dtypes {ml_dtypes.__version__}: {len(ours)} codes, {len(x)} values, all equal")


main()
