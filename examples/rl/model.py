"""Qwen3-MoE in plain PyTorch: read and write Hugging Face folders, log-probabilities, greedy answers.

    m = Model.load("models/tiny-moe-early")
    lp = m.logprobs(rows)             # rows: lists of ids; float32, one tensor a row, of tokens 1..n-1
    m.save("out", like="models/tiny-moe-early")

Arithmetic is float32.  The parameters are float32 too; with `rounded` the forward reads them rounded
to BF16, which is what save() writes and a server holds, and the gradient passes straight through.
Rows of unequal length are packed: only attention sees padding.

Routing replay: `routes`, one int array [n - 1, layers, top_k] a row, are experts that another forward
chose for tokens 0..n-2.  They replace the top-k; their weights still come from this router.
"""
import json
import os
import shutil
import struct

import numpy as np
import torch
import torch.nn.functional as F

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
PARTS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm",
         "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate")


def read_safetensors(folder):
    """{name: tensor} of every *.safetensors file of a folder of BF16, F16 or F32 tensors."""
    out = {}
    for file in sorted(f for f in os.listdir(folder) if f.endswith(".safetensors")):
        with open(os.path.join(folder, file), "rb") as f:
            header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
            data = bytearray(f.read())
        header.pop("__metadata__", None)
        for name, t in header.items():
            a, b = t["data_offsets"]
            out[name] = torch.frombuffer(data, dtype=DTYPES[t["dtype"]], count=int(np.prod(t["shape"])),
                                         offset=a).view(t["shape"])
    return out


def write_safetensors(path, tensors):
    """Tensors become BF16."""
    header, at, parts = {"__metadata__": {"format": "pt"}}, 0, []
    for name, t in tensors.items():
        data = t.detach().to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()
        header[name] = {"dtype": "BF16", "shape": list(t.shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.writelines(parts)


def through_bf16(p):
    """The nearest BF16 value, with the gradient of the identity."""
    return p + (p.detach().to(torch.bfloat16).float() - p.detach())


class Pack:
    """Rows of ids as one line of tokens, and the way to [rows, longest, ...] and back."""

    def __init__(self, rows):
        self.lengths = torch.tensor([len(r) for r in rows])
        self.ids = torch.cat([torch.as_tensor(r, dtype=torch.long) for r in rows])
        self.shape = len(rows), int(self.lengths.max())
        self.position = torch.cat([torch.arange(n) for n in self.lengths])
        self.slot = torch.repeat_interleave(torch.arange(len(rows)), self.lengths) * self.shape[1] + self.position

    def pad(self, x):
        out = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return out.index_copy(0, self.slot, x).view(*self.shape, *x.shape[1:])

    def flat(self, x):
        return x.reshape(self.shape[0] * self.shape[1], *x.shape[2:])[self.slot]


class Model(torch.nn.Module):
    def __init__(self, config, tensors):
        super().__init__()
        self.c, self.rounded = config, False
        keep = lambda t: torch.nn.Parameter(t.float().clone())  # noqa: E731
        self.embed, self.norm = keep(tensors["model.embed_tokens.weight"]), keep(tensors["model.norm.weight"])
        self.head = keep(tensors["lm_head.weight"])
        self.layers = torch.nn.ModuleList()
        for i in range(config["num_hidden_layers"]):
            p, layer = f"model.layers.{i}.", torch.nn.ParameterDict()
            for part in PARTS:
                layer[part.split(".")[-1]] = keep(tensors[p + part + ".weight"])
            for part in ("gate_proj", "up_proj", "down_proj"):
                layer["expert_" + part] = keep(torch.stack(
                    [tensors[f"{p}mlp.experts.{e}.{part}.weight"] for e in range(config["num_experts"])]))
            self.layers.append(layer)
        d = config["head_dim"]
        self.frequency = config["rope_theta"] ** (-torch.arange(0, d, 2).float() / d)

    @classmethod
    def load(cls, folder):
        with open(os.path.join(folder, "config.json")) as f:
            config = json.load(f)
        if config["model_type"] != "qwen3_moe" or config.get("tie_word_embeddings"):
            raise ValueError(f"{folder}: model_type {config['model_type']}; allowed: qwen3_moe with a head of its own")
        return cls(config, read_safetensors(folder))

    def save(self, folder, like):
        """A folder that serves: BF16 weights, and configuration and tokenizer of the folder `like`."""
        out = {"model.embed_tokens.weight": self.embed, "model.norm.weight": self.norm, "lm_head.weight": self.head}
        for i, layer in enumerate(self.layers):
            p = f"model.layers.{i}."
            for part in PARTS:
                out[p + part + ".weight"] = layer[part.split(".")[-1]]
            for part in ("gate_proj", "up_proj", "down_proj"):
                for e, w in enumerate(layer["expert_" + part]):
                    out[f"{p}mlp.experts.{e}.{part}.weight"] = w
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(like):
            if name.endswith(".json") and not name.endswith(".index.json"):
                shutil.copy(os.path.join(like, name), folder)
        write_safetensors(os.path.join(folder, "model.safetensors"), out)

    # ---- forward ----

    def read(self, p):
        return through_bf16(p) if self.rounded else p

    def rms(self, x, w):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.read(w)

    def rope(self, x, position):
        """x: [tokens, heads, d]"""
        angle = position[:, None].float() * self.frequency
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def qkv(self, layer, x, position):
        d = self.c["head_dim"]
        q, k, v = (F.linear(x, self.read(layer[n])).view(len(x), -1, d) for n in ("q_proj", "k_proj", "v_proj"))
        return (self.rope(self.rms(q, layer["q_norm"]), position), self.rope(self.rms(k, layer["k_norm"]), position), v)

    def attend(self, q, k, v, mask):
        """q: [rows, new, heads, d]; k, v: [rows, seen, kv heads, d]; mask: True where a key may be read."""
        rows, new, heads, d = q.shape
        kv = k.shape[2]
        q = q.view(rows, new, kv, heads // kv, d).permute(0, 2, 3, 1, 4).reshape(rows, kv, -1, d)
        s = (q @ k.permute(0, 2, 3, 1) * d ** -0.5).view(rows, kv, heads // kv, new, -1)
        p = s.masked_fill(~mask, float("-inf")).softmax(-1).view(rows, kv, -1, k.shape[1])
        o = (p @ v.transpose(1, 2)).view(rows, kv, heads // kv, new, d)
        return o.permute(0, 3, 1, 2, 4).reshape(rows, new, heads * d)

    def moe(self, layer, x, chosen):
        """(output, experts used)"""
        k = self.c["num_experts_per_tok"]
        p = F.linear(x, self.read(layer["gate"])).softmax(-1)
        w, ids = p.topk(k, -1) if chosen is None else (p.gather(1, chosen), chosen)
        if self.c.get("norm_topk_prob"):
            w = w / w.sum(-1, keepdim=True)
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        token = torch.div(order, k, rounding_mode="floor")
        counts = torch.bincount(flat, minlength=self.c["num_experts"]).tolist()
        gate, up, down = (self.read(layer["expert_" + n]) for n in ("gate_proj", "up_proj", "down_proj"))
        out = []
        for e, rows in enumerate(x[token].split(counts)):
            if len(rows):
                out.append((F.silu(rows @ gate[e].T) * (rows @ up[e].T)) @ down[e].T)
        y = torch.cat(out) * w.reshape(-1)[order, None]
        return torch.zeros_like(x).index_add(0, token, y), ids

    def hidden(self, pack, attention, chosen=None, seen=None):
        """attention(i, q, k, v) -> [tokens, heads * d]; chosen: [tokens, layers, top_k]; the same of this
        forward is appended to the list `seen`."""
        x, used = self.read(self.embed)[pack.ids], []
        for i, layer in enumerate(self.layers):
            q, k, v = self.qkv(layer, self.rms(x, layer["input_layernorm"]), pack.position)
            x = x + F.linear(attention(i, q, k, v), self.read(layer["o_proj"]))
            y, ids = self.moe(layer, self.rms(x, layer["post_attention_layernorm"]),
                              None if chosen is None else chosen[:, i])
            x = x + y
            used.append(ids)
        if seen is not None:
            seen.append(torch.stack(used, 1))
        return self.rms(x, self.norm)

    def causal(self, pack):
        n = pack.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        return lambda i, q, k, v: pack.flat(self.attend(pack.pad(q), pack.pad(k), pack.pad(v), mask))

    def logprobs(self, rows, starts=None, routes=None, seen=None, temperature=1.0):
        """Of the tokens starts[r].. of each row (1.. without starts), one line: [sum of n - start].  `seen`, a
        list, gets the experts used: [sum of n - 1, layers, top_k]."""
        pack = Pack([r[:-1] for r in rows])
        starts = [1] * len(rows) if starts is None else starts
        chosen = None if routes is None else torch.cat([torch.as_tensor(r, dtype=torch.long) for r in routes])
        h = self.hidden(pack, self.causal(pack), chosen, seen)
        first = torch.tensor(starts) - 1
        wanted = pack.position >= torch.repeat_interleave(first, pack.lengths)
        target = torch.cat([torch.as_tensor(r[s:], dtype=torch.long) for r, s in zip(rows, starts)])
        logits = F.linear(h[wanted], self.read(self.head))
        return (logits / temperature).log_softmax(-1).gather(1, target[:, None])[:, 0]

    @torch.no_grad()
    def greedy(self, prompts, most, stops):
        """At most `most` ids for each prompt, the stop id left out."""
        pack, c = Pack(prompts), self.c
        rows, longest = pack.shape
        room = longest + most
        kv = [torch.zeros(rows, room, c["num_key_value_heads"], c["head_dim"]) for _ in range(2 * len(self.layers))]
        causal = self.causal(pack)

        def prefill(i, q, k, v):
            kv[2 * i][:, :longest], kv[2 * i + 1][:, :longest] = pack.pad(k), pack.pad(v)
            return causal(i, q, k, v)
        last = pack.lengths.cumsum(0) - 1
        h, seen = self.hidden(pack, prefill)[last], pack.lengths.clone()
        out, live = [[] for _ in prompts], torch.arange(rows)
        while True:
            best = F.linear(h, self.head).argmax(-1)
            going = [j for j, t in enumerate(best.tolist()) if t not in stops]
            live, best = live[going], best[going]
            for r, t in zip(live.tolist(), best.tolist()):
                out[r].append(t)
            if not going or len(out[int(live[0])]) == most:
                return out
            one = Pack(best[:, None])
            one.position = seen[live]
            top = int(one.position.max()) + 1
            mask = (torch.arange(top) <= one.position[:, None])[:, None, None, None]

            def step(i, q, k, v):
                kv[2 * i][live, one.position], kv[2 * i + 1][live, one.position] = k, v
                return self.attend(q[:, None], kv[2 * i][live, :top], kv[2 * i + 1][live, :top], mask)[:, 0]
            h = self.hidden(one, step)
            seen[live] += 1
