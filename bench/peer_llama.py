#!/usr/bin/env python3
"""llama.cpp beside Moult: Qwen3-30B-A3B's layers with random weights, in turns, in one run.

    make build/bench/bench_peer
    python3 -m venv V && V/bin/pip install llama-cpp-python gguf numpy
    V/bin/python bench/peer_llama.py [--layers 2] [--rounds 5] [--pairs bf16:bf16,nvfp4:q4_0]

A pair is Moult's format and llama.cpp's of the same bits: bf16 (or f16) has 16, nvfp4 and q4_0 have 4.5.
Attention and experts have the format; embedding, head (2048 ids) and router are small and stay wide.
llama.cpp is asked for the logits of all
tokens, since it leaves out the last layer's experts for the others (that costs it the head, 4% at 2 layers).
Prefill is one batch of 512 tokens, decode 16 single tokens behind it.  Each round times both programs one
after the other; the best and the median of the rounds are printed, and Moult / llama.cpp of each.
"""
import argparse
import os
import statistics
import subprocess
import tempfile
import time

import gguf
import llama_cpp as lc
import numpy as np

HIDDEN, INNER, EXPERTS, TOP_K, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2048, 768, 128, 8, 32, 4, 128, 2048
Q = gguf.GGMLQuantizationType
TYPES = {"bf16": Q.BF16, "f16": Q.F16, "q4_0": Q.Q4_0}


def tensor(rng, rows, cols, kind):
    """Random bytes of a type, [rows][bytes of a row]."""
    if kind == Q.Q4_0:
        block = rng.integers(0, 256, (rows, cols // 32, 18), dtype=np.uint8)
        block[..., 0:2] = np.frombuffer(np.float16(0.004).tobytes(), np.uint8)
        return block.reshape(rows, -1)
    x = (rng.standard_normal((rows, cols), dtype=np.float32) / np.sqrt(cols)).astype(np.float32)
    if kind == Q.F16:
        return x.astype(np.float16)
    if kind == Q.BF16:
        return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return x


class Repeated:
    """One expert's bytes as all experts' tensor, which a full model's memory would not hold."""

    def __init__(self, one):
        self.one, self.shape, self.dtype = one, (EXPERTS, *one.shape), one.dtype
        self.nbytes = EXPERTS * one.nbytes

    def tofile(self, f):
        for _ in range(EXPERTS):
            self.one.tofile(f)


def write_gguf(path, layers, kind, vocab=VOCAB):
    rng = np.random.default_rng(1)
    w = gguf.GGUFWriter(path, "qwen3moe")
    w.add_name("random")
    w.add_context_length(4096)
    w.add_embedding_length(HIDDEN)
    w.add_block_count(layers)
    w.add_feed_forward_length(6144)
    w.add_expert_feed_forward_length(INNER)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    w.add_expert_count(EXPERTS)
    w.add_expert_used_count(TOP_K)
    w.add_vocab_size(vocab)
    w.add_tokenizer_model("none")

    def add(name, rows, cols, k):
        w.add_tensor(name, tensor(rng, rows, cols, k), raw_dtype=k if k != Q.F32 else None)

    def add_experts(name, rows, cols):
        w.add_tensor(name, Repeated(tensor(rng, rows, cols, kind)), raw_dtype=kind)

    def ones(name, n):
        w.add_tensor(name, np.ones(n, np.float32))

    add("token_embd.weight", vocab, HIDDEN, Q.F16 if vocab > VOCAB else Q.F32)
    add("output.weight", vocab, HIDDEN, Q.F16)
    ones("output_norm.weight", HIDDEN)
    for i in range(layers):
        b = f"blk.{i}."
        for name, n in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", HEAD_DIM),
                        ("attn_k_norm", HEAD_DIM)):
            ones(f"{b}{name}.weight", n)
        add(b + "attn_q.weight", HEADS * HEAD_DIM, HIDDEN, kind)
        add(b + "attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN, kind)
        add(b + "attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN, kind)
        add(b + "attn_output.weight", HIDDEN, HEADS * HEAD_DIM, kind)
        add(b + "ffn_gate_inp.weight", EXPERTS, HIDDEN, Q.F32)
        add_experts(b + "ffn_gate_exps.weight", INNER, HIDDEN)
        add_experts(b + "ffn_up_exps.weight", INNER, HIDDEN)
        add_experts(b + "ffn_down_exps.weight", HIDDEN, INNER)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


class Llama:
    def __init__(self, path, threads, clock):
        self.now = time.process_time if clock == "cpu" else time.perf_counter
        p = lc.llama_model_default_params()
        p.use_mmap = False
        self.model = lc.llama_model_load_from_file(path.encode(), p)
        c = lc.llama_context_default_params()
        c.n_ctx, c.n_batch, c.n_ubatch = 4096, 2048, 2048
        c.n_threads = c.n_threads_batch = threads
        self.ctx = lc.llama_init_from_model(self.model, c)
        if not self.ctx:
            raise SystemExit("llama.cpp did not load the model")

    def run(self, ids):
        # Logits of every token: without, the last layer is computed for the last token alone.
        b = lc.llama_batch_init(len(ids), 0, 1)
        b.n_tokens = len(ids)
        for i, token in enumerate(ids):
            b.token[i], b.pos[i], b.n_seq_id[i], b.logits[i] = token, self.at + i, 1, 1
            b.seq_id[i][0] = 0
        self.at += len(ids)
        t = self.now()
        if lc.llama_decode(self.ctx, b) != 0:
            raise SystemExit("llama_decode failed")
        lc.llama_synchronize(self.ctx)
        t = self.now() - t
        lc.llama_batch_free(b)
        return t

    def prefill(self, n):
        lc.llama_memory_clear(lc.llama_get_memory(self.ctx), True)
        self.at = 0
        return self.run([(7 * i * i + i) % 2000 for i in range(n)])

    def decode(self, n):
        return sum(self.run([(31 * i + 5) % 2000]) for i in range(n))

    def close(self):
        lc.llama_free(self.ctx)
        lc.llama_model_free(self.model)


class Moult:
    def __init__(self, program, layers, fmt, threads, clock):
        self.p = subprocess.Popen([program, str(layers), str(VOCAB), fmt, str(threads), clock], text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.isa = self.p.stdout.readline().split()[1]

    def ask(self, what, n):
        self.p.stdin.write(f"{what} {n}\n")
        self.p.stdin.flush()
        return float(self.p.stdout.readline())

    def prefill(self, n):
        return self.ask("prefill", n)

    def decode(self, n):
        return self.ask("decode", n)

    def close(self):
        self.p.stdin.close()
        self.p.wait()


def pair(args, mine, theirs):
    with tempfile.TemporaryDirectory(dir=args.dir) as d:
        path = os.path.join(d, "random.gguf")
        write_gguf(path, args.layers, TYPES[theirs])
        them = Llama(path, args.threads, args.clock)
    us = Moult(args.program, args.layers, mine, args.threads, args.clock)
    for what, n in (("prefill", args.tokens), ("decode", args.steps)):
        rates = {us: [], them: []}
        for _ in range(args.rounds + 1):
            for p in (us, them):
                if what == "decode":
                    p.prefill(16)
                rates[p].append(n / getattr(p, what)(n))
        a, b = rates[us][1:], rates[them][1:]  # the first round warms up
        for name, f in (("best", max), ("median", statistics.median)):
            print(f"{what:8s} {name:7s} moult {mine} ({us.isa}) {f(a):9.2f} tok/s   llama.cpp {theirs} "
                  f"{f(b):9.2f} tok/s   ratio {f(a) / f(b):5.2f}", flush=True)
    us.close()
    them.close()


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--tokens", type=int, default=512)
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--threads", type=int, default=os.cpu_count())
    ap.add_argument("--clock", choices=("wall", "cpu"), default="wall",
                    help="cpu: seconds of the process, for one thread on a machine that others use")
    ap.add_argument("--pairs", default="bf16:bf16,bf16:f16,nvfp4:q4_0")
    ap.add_argument("--program", default="build/bench/bench_peer")
    ap.add_argument("--dir", help="folder for the GGUF file")
    args = ap.parse_args()
    lc.llama_backend_init()
    log = lc.llama_log_callback(lambda level, text, data: None)
    lc.llama_log_set(log, None)
    print(f"# llama-cpp-python {lc.__version__}: {lc.llama_print_system_info().decode().strip()}")
    print(f"# {args.layers} layers, {args.threads} threads, prefill {args.tokens}, decode {args.steps}, "
          f"{args.rounds} rounds, {args.clock} clock")
    for p in args.pairs.split(","):
        pair(args, *p.split(":"))


if __name__ == "__main__":
    main()
