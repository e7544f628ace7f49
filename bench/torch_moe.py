"""The MoE layer of Qwen3-30B-A3B's shape in BF16 by torch's grouped GEMM: the peer of bench_cuda_moe.

    python3 bench/torch_moe.py [--json FILE] [--tokens 1,64,16384]

As bench_cuda_moe: a CUDA graph of 8 layers with weights of their own, uniform random routing, median of the replays
divided by 8.  `experts` is sort, offsets, gather, GEMM 1, silu, mul, GEMM 2, weights, scatter back, sum over the top 8;
`layer` also the router's product, softmax and top-k.  Compared with float32 before it is timed.
"""
import argparse
import json
import statistics
import sys

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    sys.exit("torch is not installed: nothing is compared")

EXPERTS, TOP_K, HIDDEN, INNER, LAYERS = 128, 8, 2048, 768, 8


def grouped(x, w, offs):
    f = getattr(F, "grouped_mm", None) or torch._grouped_mm
    return f(x, w, offs=offs)


def experts(x, w13, w2, ids, weights):
    """w13 [E, 2 * INNER, HIDDEN] and w2 [E, HIDDEN, INNER], both read as transposed."""
    m = x.shape[0]
    flat = ids.view(-1)
    order = flat.argsort(stable=True)
    offs = torch.searchsorted(flat[order], torch.arange(EXPERTS, device=x.device), right=True).to(torch.int32)
    y = grouped(x[order // TOP_K], w13.transpose(-2, -1), offs)
    h = F.silu(y[:, :INNER]) * y[:, INNER:]
    out = grouped(h, w2.transpose(-2, -1), offs) * weights.view(-1, 1)[order]
    back = torch.empty_like(out)
    back[order] = out
    return back.view(m, TOP_K, HIDDEN).sum(1)


def layer(x, router, w13, w2):
    p, ids = torch.topk(torch.softmax((x @ router.t()).float(), -1), TOP_K)
    return experts(x, w13, w2, ids, (p / p.sum(-1, keepdim=True)).to(x.dtype))


def reference(x, w13, w2, ids, weights):
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for e in ids.unique().tolist():
        t, k = (ids == e).nonzero(as_tuple=True)
        y = x[t].float() @ w13[e].float().t()
        y = (F.silu(y[:, :INNER]) * y[:, INNER:]) @ w2[e].float().t()
        out.index_add_(0, t, y * weights[t, k].float().unsqueeze(1))
    return out


def timed(fn, replays):
    """Milliseconds of a graph of fn(), after a run of it outside a graph."""
    s = torch.cuda.Stream()
    s.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(s):
        fn()
    torch.cuda.current_stream().wait_stream(s)
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        fn()
    times = []
    for i in range(-2, replays):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        g.replay()
        b.record()
        torch.cuda.synchronize()
        if i >= 0:
            times.append(a.elapsed_time(b))
    return statistics.median(times)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--json")
    p.add_argument("--tokens", default="1,8,32,64,128,256,512,1024,1209,2048,4096,8192,16384")
    a = p.parse_args()
    torch.manual_seed(1)
    torch.cuda.set_device(0)

    def rand(*shape, scale):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale
    w = [(rand(EXPERTS, HIDDEN, scale=HIDDEN ** -0.5), rand(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN ** -0.5),
          rand(EXPERTS, HIDDEN, INNER, scale=INNER ** -0.5)) for _ in range(LAYERS)]
    out = open(a.json, "a") if a.json else None
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, grouped GEMM in BF16\n"
          f"{'tokens':>6} {'layer us':>9} {'experts us':>11}  error against float32")
    for m in map(int, a.tokens.split(",")):
        x = rand(m, HIDDEN, scale=1.0)
        routing = []
        for _ in range(LAYERS):
            ids = torch.rand(m, EXPERTS, device="cuda").topk(TOP_K).indices
            weights = torch.rand(m, TOP_K, device="cuda", dtype=torch.bfloat16)
            routing.append((ids, weights))
        error = None
        if m <= 1209:
            want = reference(x, w[0][1], w[0][2], *routing[0])
            error = ((experts(x, w[0][1], w[0][2], *routing[0]).float() - want).norm() / want.norm()).item()
            if not error < 0.02:
                sys.exit(f"{m} tokens: error {error} against float32")
        n = 7 if m >= 4096 else 15
        part = timed(lambda: [experts(x, v[1], v[2], *r) for v, r in zip(w, routing)], n) * 1e3 / LAYERS
        full = timed(lambda: [layer(x, *v) for v in w], n) * 1e3 / LAYERS
        print(f"{m:6} {full:9.1f} {part:11.1f}  {'' if error is None else f'{error:.4f}'}", flush=True)
        if out:
            out.write(json.dumps({"bench": "torch", "what": "MoE layer", "format": "bf16", "tokens": m,
                                  "layer_us": full, "experts_us": part, "torch": torch.__version__}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
