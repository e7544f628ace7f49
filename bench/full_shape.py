#!/usr/bin/env python3
"""A whole model of Qwen3-30B-A3B's size from its files, then llama.cpp with one of the same bits a weight.

    make all build/bench/random_checkpoint
    build/bench/random_checkpoint CONFIG_DIR DIR --format nvfp4        # 18 GB; see its head
    V/bin/python bench/full_shape.py DIR [--tokens 64] [--threads 2]   # V: as for peer_llama.py

One after the other, since both do not fit in 24 GiB: `moult generate` on DIR (greedy), whose rates are printed,
then llama.cpp on a random q4_0 file of the same shape, written here (17.5 GB, in --dir) and read into memory, the same number
of tokens.  The same layers, experts and vocabulary; embedding and head are 16 bits in both.
"""
import argparse
import json
import os
import re
import resource
import subprocess
import tempfile
import time

import llama_cpp as lc
import peer_llama as peer

PROMPT = 64


def moult(args):
    t = time.perf_counter()
    p = subprocess.run([args.program, "generate", "--model", args.folder, "--threads", str(args.threads), "--ignore-eos",
                        "--context-length", "1024", "--max-new-tokens", str(args.tokens), "--prompt", "one " * PROMPT],
                       capture_output=True, text=True, errors="replace")
    if p.returncode:
        raise SystemExit(p.stderr)
    seconds = time.perf_counter() - t
    line = re.search(r"prompt (\d+) tokens in ([\d.]+) s; output (\d+) tokens, ([\d.]+) tok/s", p.stderr + p.stdout)
    print(f"moult: {line.group(0)}; {seconds:.1f} s from start to end, "
          f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6:.2f} GB at most", flush=True)
    return int(line.group(1)) / float(line.group(2)), float(line.group(4))


def llama(args):
    with open(os.path.join(args.folder, "config.json")) as f:
        c = json.load(f)
    shape = [c["hidden_size"], c["moe_intermediate_size"], c["num_experts"], c["num_attention_heads"]]
    if shape != [peer.HIDDEN, peer.INNER, peer.EXPERTS, peer.HEADS]:
        raise SystemExit(f"the folder's shape {shape} is not the one that peer_llama.py writes")
    with tempfile.TemporaryDirectory(dir=args.dir) as d:
        path = os.path.join(d, "random.gguf")
        peer.write_gguf(path, c["num_hidden_layers"], peer.TYPES["q4_0"], c["vocab_size"])
        print(f"llama.cpp: {os.path.getsize(path) / 1e9:.2f} GB", flush=True)
        t = time.perf_counter()
        them = peer.Llama(path, args.threads, "wall")
        them.prefill(PROMPT)
        prefill = PROMPT / them.prefill(PROMPT)
        them.decode(2)
        decode = args.tokens / them.decode(args.tokens)
        print(f"llama.cpp: prompt {prefill:.2f} tok/s, output {decode:.2f} tok/s; "
              f"{time.perf_counter() - t:.1f} s from start to end", flush=True)
        them.close()
    return prefill, decode


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("folder")
    ap.add_argument("--tokens", type=int, default=64)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--program", default="build/moult")
    ap.add_argument("--dir", help="folder for the GGUF file")
    args = ap.parse_args()
    lc.llama_backend_init()
    log = lc.llama_log_callback(lambda level, text, data: None)
    lc.llama_log_set(log, None)
    ours, theirs = moult(args), llama(args)
    for what, a, b in zip(("prompt", "output"), ours, theirs):
        print(f"{what}: moult / llama.cpp {a / b:.2f}")


if __name__ == "__main__":
    main()
