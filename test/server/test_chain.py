"""Models whose output is known token by token: end tokens, stop strings, split characters (C27, C33, C43, C47)."""
import tempfile

import checkpoint
from harness import Server

START = 10


def follow(ids):
    """steps for checkpoint.chain: START, then ids in order; no id may come twice."""
    assert len(set(ids)) == len(ids)
    return dict(zip([START] + ids, ids))


class Chain:
    """A server on a CHAIN model."""

    def __init__(self, *flags, **model):
        self.flags, self.model = flags, model

    def __enter__(self):
        self.dir = tempfile.TemporaryDirectory()
        checkpoint.chain(self.dir.name, **self.model)
        self.server = Server(self.dir.name, *self.flags)
        return self.server

    def __exit__(self, kind, *rest):
        self.server.__exit__(kind, *rest)
        self.dir.cleanup()


# 106 is met at step 3, 2 at step 5, 1 at step 7; where one is barred the second choice goes round it.
ENDS = {START: 11, 11: 12, 12: (106, 20), 106: 13, 20: 13, 13: (2, 21), 2: 14, 21: 14, 14: (1, 22), 1: 15, 22: 15,
        15: 16, 16: 17, 17: (106, 23), 23: 24, 24: 25}
END_ROWS = [  # sampling parameters, tokens, what is matched (None: length)
    ({}, 3, 106),
    ({"ignore_eos": True}, 12, None),
    ({"min_new_tokens": 2}, 3, 106),
    ({"min_new_tokens": 3}, 5, 2),
    ({"min_new_tokens": 4}, 5, 2),
    ({"min_new_tokens": 6}, 7, 1),
    ({"min_new_tokens": 8}, 11, 106),
    ({"min_new_tokens": 11}, 12, None),
    ({"min_new_tokens": 12}, 12, None),
    ({"ignore_eos": True, "stop_token_ids": [106]}, 3, 106),
    ({"ignore_eos": True, "stop_token_ids": [14, None]}, 6, 14),
    ({"ignore_eos": True, "stop_token_ids": [106], "min_new_tokens": 4}, 11, 106),
    ({"stop_token_ids": [11]}, 1, 11),
]


def test_end_tokens():
    """C47: the end set is the union of generation_config, config and tokenizer; each row streams alike."""
    one = {"eos_token": checkpoint.BYTES[1]}
    for name, eos in (("all", dict(eos=2, generation={"eos_token_id": [1, 106]}, tokenizer_config=one)),
                      ("tokenizer", dict(eos=[2, 106], tokenizer_config=one))):  # 1 stands there alone
        with Chain(steps=ENDS, **eos) as s:
            for sp, n, matched in END_ROWS:
                body = {"input_ids": [START], "sampling_params": {"temperature": 0, "max_new_tokens": 12, **sp}}
                r = s.post("/generate", body)[1]
                finish = {"type": "length", "length": n} if matched is None else {"type": "stop", "matched": matched}
                assert len(r["output_ids"]) == n and r["meta_info"]["finish_reason"] == finish, (name, sp, r)
                last = s.stream("/generate", body)[-1]
                assert last["output_ids"] == r["output_ids"] and last["meta_info"]["finish_reason"] == finish
            for path, key in (("/generate", None), ("/v1/completions", "prompt")):
                bad = {"min_new_tokens": 13, "max_new_tokens": 12}
                status, r = s.post(path, {"input_ids": [START], "sampling_params": bad} if not key else
                                   {"prompt": [START], "min_tokens": 13, "max_tokens": 12})
                assert status == 400 and "min_" in r["message"], r
    with Chain(steps=ENDS) as s:  # no end token anywhere
        for sp in ({}, {"min_new_tokens": 5}, {"ignore_eos": True}):
            r = s.generate([START], 12, **sp)
            assert len(r["output_ids"]) == 12 and r["meta_info"]["finish_reason"]["type"] == "length", r


LETTERS = [b"ABC", b"DEF", b"G", b"HI", b"J", b"K"]
STOP_ROWS = [  # stop, what is matched, text up to it (None: all)
    ("DEFGHIJ", "DEFGHIJ", "ABC"),
    ("FG", "FG", "ABCDE"),
    ("J K", None, None),
    (["XX", "HI"], "HI", "ABCDEFG"),
    (["HIJKL", "IJ"], "IJ", "ABCDEFGH"),
    (["EFGH", "DEFGHX", "CDEFGHI"], "EFGH", "ABCD"),
    (["BC", "ABC"], "ABC", ""),
    (["%04d" % i for i in range(999)] + ["GH"], "GH", "ABCDEF"),
    ("ABCDEFGHIJK" + "x" * 100000, None, None),
    ("ABCDEFGHIJK", "ABCDEFGHIJK", ""),
    ([], None, None),
    (None, None, None),
]


def test_stop_strings():
    """C43: over token borders; nothing that may belong to a stop is sent; both ways of trimming."""
    ids = [256 + i for i in range(len(LETTERS))]
    whole = "".join(p.decode() for p in LETTERS)
    ends = [len(b"".join(LETTERS[:i + 1])) for i in range(len(LETTERS))]
    with Chain(steps=follow(ids), extra=LETTERS) as s, Chain("--incremental-streaming-output", steps=follow(ids),
                                                            extra=LETTERS) as inc:
        for stop, matched, text in STOP_ROWS:
            for keep in (False, True):
                sp = {"temperature": 0, "max_new_tokens": len(ids), "stop": stop, "no_stop_trim": keep}
                body = {"input_ids": [START], "sampling_params": sp}
                r = s.post("/generate", body)[1]
                want, n = (whole, len(ids)) if matched is None else (text, None)
                if matched is not None:  # the token in which the stop ends is the last
                    n = next(i + 1 for i, at in enumerate(ends) if at >= len(text) + len(matched))
                    if keep:
                        want = whole[:ends[n - 1]]
                finish = {"type": "stop", "matched": matched} if matched else {"type": "length", "length": n}
                assert r["text"] == want and r["output_ids"] == ids[:n], (stop, keep, r)
                assert r["meta_info"]["finish_reason"] == finish, (stop, keep, r)
                texts = [f["text"] for f in s.stream("/generate", body)]
                assert texts[-1] == want and all(b.startswith(a) for a, b in zip(texts, texts[1:])), (stop, texts)
                deltas = [f["text"] for f in inc.stream("/generate", body)]
                assert "".join(deltas) == want, (stop, deltas)
                ask = {"prompt": [START], "max_tokens": len(ids), "temperature": 0, "stop": stop, "no_stop_trim": keep}
                c = s.post("/v1/completions", ask)[1]["choices"][0]
                assert c["text"] == want and c["matched_stop"] == matched, (stop, c)
                assert "".join(f["choices"][0]["text"] for f in s.stream("/v1/completions", ask)) == want
        for bad in ("", ["a", ""], 5, {"a": 1}):
            assert s.post("/generate", {"input_ids": [START], "sampling_params": {"stop": bad}})[0] == 400
        assert s.post("/generate", {"input_ids": [START], "sampling_params": {"stop": ["x"] * 1025}})[0] == 400


FACE, FAMILY = "\U0001f600".encode(), "\U0001f468\u200d\U0001f469\u200d\U0001f467".encode()
DCARON, WATER = "\u010f".encode(), "\u6c34".encode()
SPLITS = [  # pieces, one a token
    [b"a", FACE[:1], FACE[1:], b"b"],
    [FACE[:2], FACE[2:]],
    [FACE[:3], FACE[3:], b"."],
    [FAMILY[:5], FAMILY[5:9], FAMILY[9:12], FAMILY[12:]],
    [DCARON[:1], DCARON[1:]],
    [WATER[:1], WATER[1:] + "\u706b".encode(), b"!"],
    [b"a", b"\xff", b"b"],
    [b"a", b"\x80\x80", FACE],
    [b"x", FACE[:3]],
    [FACE[:3]],
    [b" hello", b" there", b"\t", b"  ", b"!"],
    [FACE[:2] + b"A", b"\xed\xa0", b"\x80", b"\xc0\x80", b"\xf4\x90\x80\x80"],
]


def test_split_characters():
    """C27, C33: a stream sends whole characters only, the first space stays, and all of it is the one-shot decode."""
    for pieces in SPLITS:
        ids = [256 + i for i in range(len(pieces))]
        want = b"".join(pieces).decode("utf-8", "replace")
        with Chain("--incremental-streaming-output", steps=follow(ids), extra=pieces) as s:
            sp = {"temperature": 0, "max_new_tokens": len(ids)}
            body = {"input_ids": [START], "sampling_params": sp, "return_logprob": True, "return_text_in_logprobs": True}
            r = s.post("/generate", body)[1]
            assert r["text"] == want and r["output_ids"] == ids, (pieces, r)
            assert [x[2] for x in r["meta_info"]["output_token_logprobs"]] == [p.decode("utf-8", "replace") for p in pieces]
            assert "".join(f["text"] for f in s.stream("/generate", body)) == want
            ask = {"prompt": [START], "max_tokens": len(ids), "temperature": 0}
            assert s.post("/v1/completions", ask)[1]["choices"][0]["text"] == want
            assert "".join(f["choices"][0]["text"] for f in s.stream("/v1/completions", ask)) == want


def test_special_tokens_are_skipped_or_kept():
    """C33: skip_special_tokens decides for special tokens alone; what stands around them stays."""
    pieces = [b" a", b"b ", b" c"]
    added = [("<|x|>", True), ("<y>", False)]
    ids = [256, 259, 257, 260, 258]
    for skip, want in ((True, " ab <y> c"), (False, " a<|x|>b <y> c")):
        with Chain("--incremental-streaming-output", steps=follow(ids), extra=pieces, added=added) as s:
            sp = {"temperature": 0, "max_new_tokens": len(ids), "skip_special_tokens": skip}
            body = {"input_ids": [START], "sampling_params": sp}
            assert s.post("/generate", body)[1]["text"] == want
            assert "".join(f["text"] for f in s.stream("/generate", body)) == want
