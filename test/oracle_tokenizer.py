"""Compare the tokenizer with the `tokenizers` wheel: zero differences are allowed.

    python test/oracle_tokenizer.py TOKDUMP [--shared ../shared] [--build build] [--n 20000]

TOKDUMP is the program of test/tools/tokdump.c.  Needs the `tokenizers` package (0.23).
"""

import argparse
import glob
import gzip
import json
import os
import random
import struct
import subprocess
import sys
import unicodedata

from tokenizers import Tokenizer

REFUSED = 0xFFFFFFFF
ADDED = [  # content, flags: the tokens of the added-token cases
    ("<a>", {"lstrip": True}),
    ("<b>", {"rstrip": True}),
    ("<ab>", {}),
    ("<c>", {"lstrip": True, "rstrip": True, "normalized": True}),
    ("abc", {"single_word": True}),
    ("Foo", {"normalized": True}),
    ("e\u0301x", {"normalized": True}),
    ("\u00e9", {"single_word": True, "lstrip": True, "normalized": True}),
    ("<|im_start|>", {"special": True}),
    ("<|im_start|>x", {"special": True}),
    (" Foo", {}),
    ("\u0120q", {}),
    ("\u65e5 \u672c", {"special": True, "normalized": True}),
]
CASES = [
    "hello", " hello", "  hello", "\thello", "\t", "\t\t hello", "hello !", " !", " ! ", "hello ! ",
    "\uff28\uff49", "! ! !", "\u00e9", "e\u0301", "\u1112\u1161\u11ab",
    "\ufb01", "\uff11\uff12", "x <a> y", "x<b>  y", "<ab>", "<a><b>", "abcd abc", "<|im_start|>user",
    "\u00a0<a>\u00a0", "\u200b<b>\u200b", "abc\u200d", "abc\u0301", "", " ", "\n\n\n a", "\x00", "a\x00b",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u180e a", "\x85 \x1c\x1d a", "DON'T don'\u017f I'LL",
    "\u0390\u03b0\u1e9b\u0323", "a\u0323\u0307\u0301\u0316" * 9, "\uac00\u11a8\u1100\u1161", "\u0344 \u0958",
]


def pieces(rng, alphabet, n):
    return "".join(rng.choice(alphabet) for _ in range(n))


def assigned():
    return [chr(c) for c in range(0x110000)
            if not 0xD800 <= c <= 0xDFFF and unicodedata.category(chr(c)) not in ("Cn", "Cs")]


def texts(shared, n, added, rng):
    yield from CASES
    with open(os.path.join(shared, "data/gsm8k/test.jsonl"), encoding="utf-8") as f:
        for line in f:
            d = json.loads(line)
            yield d["question"]
            yield d["answer"]
    for pattern in ("src/*/*.[ch]", "test/*.py", "../shared/reference/*.md"):
        for path in sorted(glob.glob(pattern))[:40]:
            with open(path, encoding="utf-8") as f:
                yield f.read()
    every = assigned()
    for i in range(0, len(every), 500):
        yield "".join(every[i:i + 500])
        yield " ".join(every[i:i + 500:7])
    marks = [c for c in every if unicodedata.combining(c)]
    small = list("aAbZz \n\r\t'.,!09_-/") + ["\u00e9", "e\u0301", "\u3042", "\u4e2d", "\u0645", "\U0001f600"]
    words = small + added + [" ", "  ", "\u00a0", "\u200b", "\n", "the", " of", "123", "'s", "'LL"]
    for _ in range(n):
        k = rng.randrange(6)
        size = rng.randrange(1, 40)
        if k == 0:
            yield pieces(rng, every, size)
        elif k == 1:
            yield pieces(rng, small + marks, size)
        elif k == 2:
            yield bytes(rng.randrange(256) for _ in range(size)).decode("utf-8", "replace")
        elif k == 3:
            base = rng.randrange(0, len(every) - 100)
            yield pieces(rng, every[base:base + 100] + small, size)
        else:
            yield pieces(rng, words, size)
    for c in ("a", " ", "_", "\n", "\u4e2d", "ab", "1", "!", "\u0301\u0323", "A"):
        yield c * 3000
    for c in ("a", " ", "_", "\n", "\u4e2d\u5c71\u306e", "aB"):  # C29: the heap's way
        yield c * (100000 // len(c))


def ask(tokdump, path, requests):
    """requests: (op, payload bytes, count); gives raw answers."""
    data = b"".join(op + struct.pack("<I", count) + body for op, body, count in requests)
    got = subprocess.run([tokdump, path], input=data, stdout=subprocess.PIPE, check=True).stdout
    at, out = 0, []
    for op, _, _ in requests:
        (n,) = struct.unpack_from("<I", got, at)
        at += 4
        size = 0 if n == REFUSED else n * 4 if op == b"E" else n
        out.append(None if n == REFUSED else got[at:at + size])
        at += size
    return out


def compare(tokdump, path, shared, n, seed):
    rng = random.Random(seed)
    ref = Tokenizer.from_file(path)
    ref.no_truncation()
    added = [t.content for t in ref.get_added_tokens_decoder().values()]
    added = added if len(added) < 40 else rng.sample(added, 40)
    all_texts = list(texts(shared, n, added, rng))
    raw = [t.encode("utf-8") for t in all_texts]
    want = [e.ids for e in ref.encode_batch(all_texts, add_special_tokens=False)]
    got = ask(tokdump, path, [(b"E", r, len(r)) for r in raw])
    bad = 0
    for text, w, g in zip(all_texts, want, got):
        ids = None if g is None else list(struct.unpack(f"<{len(g) // 4}I", g))
        if ids != w:
            bad += 1
            if bad <= 5:
                print(f"  encode {text[:80]!r}: want {w[:20]}, got {ids and ids[:20]}")
    top = ref.get_vocab_size() + 3
    seqs = want[:] + [[rng.randrange(top) for _ in range(rng.randrange(1, 30))] for _ in range(n)]
    for skip in (False, True):
        texts_want = ref.decode_batch(seqs, skip_special_tokens=skip)
        got = ask(tokdump, path,
                  [(b"S" if skip else b"D", struct.pack(f"<{len(s)}I", *s), len(s)) for s in seqs])
        for s, w, g in zip(seqs, texts_want, got):
            if g is None or g != w.encode("utf-8"):
                bad += 1
                if bad <= 10:
                    print(f"  decode {s[:20]}: want {w[:60]!r}, got {g and g[:60]!r}")
    print(f"{path}: {len(all_texts)} texts, {2 * len(seqs)} decodes, {bad} differences", flush=True)
    return bad


def flagged(base, path, **change):
    """A copy of the tokenizer `base` with the added tokens of the cases and changed parts."""
    with open(base, encoding="utf-8") as f:
        d = json.load(f)
    top = max(d["model"]["vocab"].values()) + 1
    d["added_tokens"] = [
        {"id": top + i, "content": c, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": False, **flags} for i, (c, flags) in enumerate(ADDED)]
    d.update(change)
    with open(path, "w", encoding="utf-8") as f:
        json.dump(d, f, ensure_ascii=False)
    return path


def main():
    a = argparse.ArgumentParser()
    a.add_argument("tokdump")
    a.add_argument("--shared", default="../shared")
    a.add_argument("--build", default="build")
    a.add_argument("--n", type=int, default=20000)
    a.add_argument("--seed", type=int, default=1)
    a.add_argument("--only", default="")
    o = a.parse_args()
    os.makedirs(o.build, exist_ok=True)
    tiny = os.path.join(o.shared, "models/tiny-moe/final/tokenizer.json")

    def byte_level(regex, prefix):
        return {"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": True, "use_regex": regex}

    j = lambda name: os.path.join(o.build, name)
    files = [(tiny, o.n), (flagged(tiny, j("flags.json")), 5 * o.n),
             (flagged(tiny, j("gpt2.json"), normalizer=None, pre_tokenizer=byte_level(True, True)), o.n),
             (flagged(tiny, j("plain.json"), pre_tokenizer=byte_level(False, False)), o.n),
             (flagged(tiny, j("string.json"), pre_tokenizer={"type": "Sequence", "pretokenizers": [
                 {"type": "Split", "pattern": {"String": "."}, "behavior": "Isolated", "invert": False},
                 {"type": "Split", "pattern": {"Regex": "\\d*|^b|a$|(?=Z)"}, "behavior": "Isolated",
                  "invert": False}, byte_level(True, True)]}), o.n)]
    for name in ("Qwen3", "DeepSeek-V3", "gpt-oss"):
        path = j(name + ".json")
        with gzip.open(os.path.join(o.shared, "tokenizers", name, "tokenizer.json.gz")) as f:
            with open(path, "wb") as to:
                to.write(f.read())
        files.append((path, o.n))
    bad = sum(compare(o.tokdump, p, o.shared, n, o.seed) for p, n in files if o.only in p)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
