"""Model folders made by tests: a safetensors writer, a byte-level tokenizer, and the CHAIN model."""
import json
import os
import struct

BYTES, _next = {}, 0x100  # byte -> its letter in the byte-level alphabet of GPT-2
for _b in range(256):
    _plain = 0x21 <= _b <= 0x7E or 0xA1 <= _b <= 0xAC or _b >= 0xAE
    BYTES[_b] = chr(_b if _plain else _next)
    _next += not _plain


def bf16(values):
    """Packed bfloat16, rounded to nearest even."""
    out = bytearray()
    for v in values:
        u, = struct.unpack("<I", struct.pack("<f", v))
        out += struct.pack("<H", (u + 0x7FFF + (u >> 16 & 1)) >> 16)
    return bytes(out)


def write_safetensors(path, tensors):
    """tensors: {name: (shape, bf16 bytes)}"""
    header, at = {}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, data in tensors.values():
            f.write(data)


def tokenizer(extra=(), added=()):
    """Ids 0..255 are bytes, then `extra` byte strings, then added tokens (content, special)."""
    vocab = {BYTES[b]: b for b in range(256)}
    for i, piece in enumerate(extra):
        vocab["".join(BYTES[b] for b in piece)] = 256 + i
    return {"normalizer": None, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocab, "merges": []},
            "added_tokens": [{"id": 256 + len(extra) + i, "content": c, "special": special, "normalized": False,
                              "lstrip": False, "rstrip": False, "single_word": False}
                             for i, (c, special) in enumerate(added)]}


def config(vocab, hidden, **k):
    c = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "vocab_size": vocab, "hidden_size": hidden,
         "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1,
         "num_key_value_heads": 1, "head_dim": 16, "num_experts": 2, "num_experts_per_tok": 1, "norm_topk_prob": True,
         "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 1024, "hidden_act": "silu",
         "tie_word_embeddings": False}
    c.update(k)
    return c


def shapes(c):
    """Name -> shape of every tensor of the model."""
    h, v, d = c["hidden_size"], c["vocab_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    out = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not c["tie_word_embeddings"]:
        out["lm_head.weight"] = (v, h)
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}."
        out.update({p + "input_layernorm.weight": (h,), p + "post_attention_layernorm.weight": (h,),
                    p + "self_attn.q_proj.weight": (q, h), p + "self_attn.k_proj.weight": (kv, h),
                    p + "self_attn.v_proj.weight": (kv, h), p + "self_attn.o_proj.weight": (h, q),
                    p + "self_attn.q_norm.weight": (d,), p + "self_attn.k_norm.weight": (d,)})
        dense = i in c.get("mlp_only_layers", []) or (i + 1) % c.get("decoder_sparse_step", 1)
        inner = c["intermediate_size"] if dense else c["moe_intermediate_size"]
        if not dense:
            out[p + "mlp.gate.weight"] = (c["num_experts"], h)
        for m in [p + "mlp."] if dense else [p + f"mlp.experts.{e}." for e in range(c["num_experts"])]:
            out.update({m + "gate_proj.weight": (inner, h), m + "up_proj.weight": (inner, h),
                        m + "down_proj.weight": (h, inner)})
    return out


def write_folder(path, c, tensors, tok, generation=None, tokenizer_config=None):
    os.makedirs(path, exist_ok=True)
    write_safetensors(os.path.join(path, "model.safetensors"), tensors)
    for name, what in (("config.json", c), ("tokenizer.json", tok), ("generation_config.json", generation),
                       ("tokenizer_config.json", tokenizer_config)):
        if what is not None:
            with open(os.path.join(path, name), "w") as f:
                json.dump(what, f)
    return path


def chain(path, steps, extra=(), added=(), eos=None, generation=None, tokenizer_config=None, size=512):
    """A model whose greedy continuation of a token t is steps[t] (or the first of them, the others following in
    order where that one is barred); any other token repeats itself.  Attention and experts are zero, the
    embedding is one-hot, the head is the table of successors."""
    c = config(size, size, **({} if eos is None else {"eos_token_id": eos}))
    one = bf16([1.0])
    tensors = {}
    for name, shape in shapes(c).items():
        n = shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[name] = (shape, one * n if len(shape) == 1 else bytes(2 * n))
    embed, head = bytearray(2 * size * size), bytearray(2 * size * size)
    for t in range(size):
        embed[2 * (t * size + t):2 * (t * size + t) + 2] = one
        nexts = steps.get(t, t)
        for rank, s in enumerate(nexts if isinstance(nexts, (list, tuple)) else [nexts]):
            at = 2 * (s * size + t)
            head[at:at + 2] = bf16([2.0 / (1 << rank)])
    tensors["model.embed_tokens.weight"] = ((size, size), bytes(embed))
    tensors["lm_head.weight"] = ((size, size), bytes(head))
    return write_folder(path, c, tensors, tokenizer(extra, added), generation, tokenizer_config)
