"""Qwen3-MoE in plain PyTorch: read and write Hugging Face folders, log-probabilities of given tokens.

    m = Model.load("models/tiny-moe-early")
    lp = m.logprobs(rows)             # rows: lists of ids; float32, one line, of tokens 1..n-1 of each row
    m.save("out", like="models/tiny-moe-early")

Arithmetic and parameters are float32; save() writes BF16.  Rows of unequal length are packed into one
line, in which a prompt that neighbouring rows share stands once; only attention sees padding.

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


class Spread(torch.autograd.Function):
    """x[order // k]: each token k times, in the order of its experts.  Backward gathers, it does not scatter."""

    @staticmethod
    def forward(ctx, x, order, place, k):
        ctx.place, ctx.k = place, k
        return x[torch.div(order, k, rounding_mode="floor")]

    @staticmethod
    def backward(ctx, g):
        return g[ctx.place].view(-1, ctx.k, g.shape[1]).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """x[place]; order is the inverse of place."""

    @staticmethod
    def forward(ctx, x, place, order):
        ctx.order = order
        return x[place]

    @staticmethod
    def backward(ctx, g):
        return g[ctx.order], None, None


class Pieces:
    """Pieces of a line of tokens, one after the other, and the way to [pieces, longest, ...] and back."""

    def __init__(self, lengths):
        self.lengths, self.shape = torch.tensor(lengths), (len(lengths), max(1, *lengths))
        self.slot = torch.cat([torch.arange(n) + i * self.shape[1] for i, n in enumerate(lengths)])

    def pad(self, x):
        out = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        return out.index_copy(0, self.slot, x).view(*self.shape, *x.shape[1:])

    def flat(self, x):
        return x.reshape(self.shape[0] * self.shape[1], *x.shape[2:])[self.slot]


def bias(mask):
    """To add to scores: 0 where the mask is True, else -inf."""
    return torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))


class Pack:
    """Rows of ids as one line of tokens: first the heads of all rows (row[:start]; once if the row before has the
    same, as the answers to one prompt do), then their tails."""

    def __init__(self, rows, starts):
        heads, self.owner = [], []
        for row, start in zip(rows, starts):
            if not heads or heads[-1] != row[:start]:
                heads.append(row[:start])
            self.owner.append(len(heads) - 1)
        tails = [row[start:] for row, start in zip(rows, starts)]
        self.heads, self.tails = Pieces([len(h) for h in heads]), Pieces([len(t) for t in tails])
        self.ids = torch.tensor([i for piece in heads + tails for i in piece])
        self.position = torch.cat([torch.arange(len(h)) for h in heads] +
                                  [torch.arange(s, s + len(t)) for s, t in zip(starts, tails)])
        # where each row's tokens are in the line
        at = torch.arange(len(self.ids)).split([len(p) for p in heads + tails])
        self.rows = [torch.cat((at[o], at[len(heads) + i])) for i, o in enumerate(self.owner)]
        # what a token may read: of a head what is before it; of a tail its head, and what is before it
        n, a, b = len(rows), self.heads.shape[1], self.tails.shape[1]
        self.head_bias = bias(torch.ones(a, a, dtype=torch.bool).tril())
        known = (torch.arange(a) < self.heads.lengths[self.owner][:, None])[:, None].expand(n, b, a)
        own = torch.ones(b, b, dtype=torch.bool).tril().expand(n, b, b)
        self.tail_bias = bias(torch.cat((known, own), 2)[:, None, None])


class Model(torch.nn.Module):
    def __init__(self, config, tensors):
        super().__init__()
        self.c = config
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

    def rms(self, x, w):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * w

    def qkv(self, layer, x, turn):
        def rope(x):
            a, b = x.chunk(2, -1)
            cos, sin = turn
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        q, k, v = (F.linear(x, layer[n]).view(len(x), -1, self.c["head_dim"]) for n in ("q_proj", "k_proj", "v_proj"))
        return rope(self.rms(q, layer["q_norm"])), rope(self.rms(k, layer["k_norm"])), v

    def attend(self, q, k, v, bias):
        """q: [pieces, new, heads, d]; k, v: [pieces, seen, kv heads, d]; bias: -inf where a key may not be read."""
        n, new, heads, d = q.shape
        kv, seen = k.shape[2], k.shape[1]
        q = (q * d ** -0.5).view(n, new, kv, heads // kv, d).permute(0, 2, 3, 1, 4).reshape(n, kv, -1, d)
        s = (q @ k.permute(0, 2, 3, 1)).view(n, kv, heads // kv, new, seen) + bias
        o = (s.softmax(-1).view(n, kv, -1, seen) @ v.transpose(1, 2)).view(n, kv, heads // kv, new, d)
        return o.permute(0, 3, 1, 2, 4).reshape(n, new, heads * d)

    def attention(self, pack, q, k, v):
        """Heads read themselves, tails their heads and themselves."""
        heads, tails = pack.heads, pack.tails
        n = len(heads.slot)
        hk, hv = heads.pad(k[:n]), heads.pad(v[:n])
        first = heads.flat(self.attend(heads.pad(q[:n]), hk, hv, pack.head_bias))
        k, v = (torch.cat((h[pack.owner], tails.pad(x[n:])), 1) for h, x in ((hk, k), (hv, v)))
        return torch.cat((first, tails.flat(self.attend(tails.pad(q[n:]), k, v, pack.tail_bias))))

    def moe(self, layer, x, chosen):
        """(output, experts used)"""
        k = self.c["num_experts_per_tok"]
        p = F.linear(x, layer["gate"]).softmax(-1)
        w, ids = p.topk(k, -1) if chosen is None else (p.gather(1, chosen), chosen)
        if self.c.get("norm_topk_prob"):
            w = w / w.sum(-1, keepdim=True)
        flat = ids.reshape(-1)
        order = flat.argsort(stable=True)
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        counts = torch.bincount(flat, minlength=self.c["num_experts"]).tolist()
        weights = zip(*(layer["expert_" + n].unbind(0) for n in ("gate_proj", "up_proj", "down_proj")))
        out = [F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
               for rows, (gate, up, down) in zip(Spread.apply(x, order, place, k).split(counts), weights)]
        y = Permute.apply(torch.cat(out), place, order).view(len(x), k, -1)
        return (w[:, None] @ y)[:, 0], ids

    def hidden(self, pack, chosen=None, seen=None):
        """[tokens of the line, hidden]; chosen: [tokens, layers, top_k]; the same of this forward is appended to `seen`."""
        angle = pack.position[:, None, None].float() * self.frequency
        x, turn, used = self.embed[pack.ids], (angle.cos(), angle.sin()), []
        for i, layer in enumerate(self.layers):
            q, k, v = self.qkv(layer, self.rms(x, layer["input_layernorm"]), turn)
            x = x + F.linear(self.attention(pack, q, k, v), layer["o_proj"])
            y, ids = self.moe(layer, self.rms(x, layer["post_attention_layernorm"]),
                              None if chosen is None else chosen[:, i])
            x = x + y
            used.append(ids)
        if seen is not None:
            seen.append(torch.stack(used, 1)[torch.cat(pack.rows)])
        return self.rms(x, self.norm)

    def logprobs(self, rows, starts=None, routes=None, seen=None, temperature=1.0):
        """Of the tokens starts[r].. of each row (1.. without starts), one line: [sum of n - start].  `seen`, a
        list, gets the experts used: [sum of n - 1, layers, top_k]."""
        starts = [1] * len(rows) if starts is None else starts
        pack, chosen = Pack([r[:-1] for r in rows], starts), None
        if routes is not None:
            chosen = torch.zeros(len(pack.ids), *routes[0].shape[1:], dtype=torch.long)
            for places, r in zip(pack.rows, routes):
                chosen[places] = torch.as_tensor(r, dtype=torch.long)
        h = self.hidden(pack, chosen, seen)[torch.cat([places[s - 1:] for places, s in zip(pack.rows, starts)])]
        target = torch.cat([torch.as_tensor(r[s:], dtype=torch.long) for r, s in zip(rows, starts)])
        logits = F.linear(h, self.head)
        return (logits / temperature).log_softmax(-1).gather(1, target[:, None])[:, 0]
