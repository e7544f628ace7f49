"""Where a step's time goes, kernel by kernel, by Nsight Compute.

    bench/kernel_times.py [--format nvfp4] [--batch 1,64,1209] [--prefill] [--bin build/bench] [--json FILE]

bench_cuda_model runs three layers without graphs under `ncu` (clocks and caches left alone), which times each kernel by
itself.  Printed: the kernels of the last layer of the last step, in microseconds, by what they do, and what comes once a
step.  Alone, a kernel has the gaps before and behind it that programmatic launches hide in a served step.
"""
import argparse
import csv
import json
import os
import subprocess
import sys

LAYERS = 3


def launches(command):
    """(name, microseconds) in order."""
    p = subprocess.run(["ncu", "--csv", "--clock-control", "none", "--cache-control", "none", "--metrics",
                        "gpu__time_duration.sum", "-k", "regex:gemm|norm|rope|attn|route|sample|swiglu", *command],
                       capture_output=True, text=True)
    lines = p.stdout.splitlines()
    heads = [i for i, x in enumerate(lines) if x.startswith('"ID"')]
    if p.returncode != 0 or not heads:
        sys.exit(f"ncu ended with {p.returncode}:\n" + "\n".join(lines[-8:]) + p.stderr[-500:])
    scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}
    return [(r["Kernel Name"].split("(")[0], float(r["Metric Value"].replace(",", "")) * scale[r["Metric Unit"]])
            for r in csv.DictReader(lines[heads[0]:]) if r["Metric Name"].startswith("gpu__time")]


def is_plan(name):
    return name.startswith("attn") and "plan" in name


def is_rope(name):
    """Once a layer; attn_few does it with the attention."""
    return "rope" in name or "attn_few" in name


def steps(all_launches):
    """Each begins with the plan of its attention, or without one with the embedding."""
    out, last = [], ""
    for name, us in all_launches:
        if is_plan(name) and not is_plan(last) or "norm_embed" in name and not is_plan(last):
            out.append([])
        if out:
            out[-1].append((name, us))
        last = name
    return out


def roles(layer):
    """What each kernel of a layer does, from its place."""
    at, out = "start", []
    for name, us in layer:
        if "norm_route" in name:
            at, role = "route", "add, norm, router, top-k and plan"
        elif "attn_few" in name:
            at, role = "attn", "q/k norm, rope, KV write, attention"
        elif "norm" in name:
            at = "norm" if at in ("start", "experts") else "norm 2"
            role = "combine or embed, norm" if at == "norm" else "add, norm"
        elif "rope" in name:
            at, role = "rope", "q/k norm, rope, KV write"
        elif "attn" in name:
            at, role = "attn", "attention"
        elif "route" in name:
            at, role = "route", "top-k and plan"
        elif at == "norm":
            role = "q, k, v"
        elif at == "attn":
            role = "o"
        elif at == "norm 2":
            role = "router"
        else:
            role, at = ("experts, GEMM 1" if at == "route" else "experts, GEMM 2"), "experts"
        out.append((role, name, us))
    return out


def report(what, s, out):
    ropes = [i for i, (name, _) in enumerate(s) if is_rope(name)]
    first = next(i for i, (name, _) in enumerate(s) if not is_plan(name))
    if len(ropes) != LAYERS:
        sys.exit(f"{len(ropes)} layers in a step:\n" + "\n".join(n for n, _ in s))
    period, before = ropes[2] - ropes[1], ropes[0] - first
    begin = ropes[2] - before
    layer, tail = roles(s[begin:begin + period]), s[begin + period:]
    print(f"{what}: a layer {sum(x[2] for x in layer):.1f} us; once a step {sum(u for _, u in s[:first] + tail):.1f} us")
    for role, name, us in layer + [("once", n, u) for n, u in s[:first] + tail]:
        print(f"  {role:36} {name:32} {us:9.1f}")
        if out:
            out.write(json.dumps({"bench": "kernels", "what": what, "role": role, "kernel": name, "us": us}) + "\n")
    sys.stdout.flush()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--format", default="nvfp4")
    p.add_argument("--batch", default="1,64,1209")
    p.add_argument("--prefill", action="store_true")
    p.add_argument("--bin", default="build/bench")
    p.add_argument("--json")
    a = p.parse_args()
    out = open(a.json, "a") if a.json else None
    base = [os.path.join(a.bin, "bench_cuda_model"), a.format, str(LAYERS), "--no-graphs", "--repeat", "1"]
    for batch in filter(None, a.batch.split(",")):
        s = steps(launches([*base, "--part", "decode", "--batch", batch]))
        report(f"{a.format}, decode, batch {batch}" + (", 960 of 1,000 shared" if batch == "1209" else ""), s[-1], out)
    if a.prefill:
        s = steps(launches([*base, "--part", "prefill"]))
        report(f"{a.format}, prefill of 1 x 8,192", s[1], out)
        report(f"{a.format}, prefill of 8 x 1,024", s[-1], out)


if __name__ == "__main__":
    main()
