#!/usr/bin/env python3
"""CPU microseconds of token masks (text/grammar.h) with real vocabularies: drawing random texts from them.

usage: grammar_masks.py GRAMMARTOOL [SHARED]
"""
import gzip
import json
import subprocess
import sys
import tempfile

PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
          "required": ["name", "age", "tags"], "additionalProperties": False}
CASES = [("schema of three properties", {"schema": PERSON, "samples": 20, "max": 300}), ("json_object", {"object": True, "samples": 20, "max": 300}),
         ("regex (\\d{3}-){2}\\d{4}", {"regex": "(\\d{3}-){2}\\d{4}", "samples": 50, "max": 50}),
         ("string of at most 2000 characters", {"schema": {"type": "string", "maxLength": 2000}, "samples": 4, "max": 600})]


def main():
    shared = sys.argv[2] if len(sys.argv) > 2 else "../shared"
    for name in ("Qwen3", "DeepSeek-V3"):
        with tempfile.NamedTemporaryFile(suffix=".json") as f:
            f.write(gzip.open(f"{shared}/tokenizers/{name}/tokenizer.json.gz").read())
            f.flush()
            cases = [dict(c, seed=i + 1) for i, (_, c) in enumerate(CASES)]
            out = json.loads(subprocess.run([sys.argv[1], f.name], input=json.dumps(cases).encode(), stdout=subprocess.PIPE, check=True).stdout)
        for (what, _), r in zip(CASES, out):
            print(f"{name:12} {what:34} {r['masks']:5} masks, mean {r['us']:7.0f} us, slowest {r['first_us']:7.0f} us")


main()
