#!/usr/bin/env python3
"""Compare the grammar automaton with Python's re (ASCII, whole match) and with the jsonschema package.

usage: oracle_grammar.py GRAMMARTOOL [N [SEED]]    (jsonschema needed; GRAMMARTOOL is test/tools/grammartool.c)

Regexes: N random ones, each on random strings and on strings that re's own language suggests; the texts drawn
from the token masks must match.  Schemas: every text drawn from the masks must be valid, and JSON texts that are
taken must be valid; where a schema is closed, the valid ones in the schema's order must be taken.
A few cases also compare every mask with its definition (text + token is a beginning of a text).
"""
import json
import random
import re
import subprocess
import sys

import jsonschema

TOKENIZER = "models/tiny-moe/tokenizer.json"
ATOMS = ["a", "b", "c", "0", "é", "日", "😀", "\\.", "[a-c]", "[^a]", "[^\\W\\d]", "[\\d_-]", "\\d", "\\w", "\\s", "\\S", "\\D", "\\W", ".",
         "[é-日]", "\\n", "\\x41", "[]a]", "\\u00e9", "{", "}", "-", '"', "\\\\", "[\\\\/]", "\\t"]
ALPHABET = ["a", "b", "c", "d", "0", "9", "_", "-", ".", " ", "\n", "\t", "é", "ö", "日", "😀", "A", "{", "}", '"', "\\", "/", "\x7f", "\u0416", "]"]


def regex(r, depth=0):
    k = r.random()
    if depth > 3 or k < 0.35:
        s = r.choice(ATOMS)
    elif k < 0.6:
        return "".join(regex(r, depth + 1) for _ in range(r.randint(1, 3)))
    elif k < 0.8:
        s = "(" + r.choice(["", "?:", "?P<n%d>" % r.randint(0, 10**9)]) + "|".join(regex(r, depth + 1) for _ in range(r.randint(1, 3))) + ")"
    else:
        s = "(" + regex(r, depth + 1) + ")"
    q = r.random()
    if q < 0.4 and s not in "{}":
        s += r.choice(["?", "*", "+", "{2}", "{1,3}", "{2,}", "{,2}", "*?", "+?", "??", "{1,2}?"])
    return s


def regex_cases(r, n):
    for _ in range(n):
        p = regex(r)
        if r.random() < 0.2:
            p = "^" + p if "|" not in p else p
        texts = ["".join(r.choice(ALPHABET) for _ in range(r.randint(0, 6))) for _ in range(30)]
        yield {"regex": p, "texts": texts, "samples": 4, "max": 40, "seed": r.randint(0, 10**9)}


def schema(r, depth=0):
    k = r.random()
    if depth > 2 or k < 0.45:
        return r.choice([
            lambda: {"type": "string"},
            lambda: {"type": "string", "minLength": r.randint(0, 3), "maxLength": r.randint(3, 6)},
            lambda: {"type": "string", "pattern": r.choice(["^[a-z]+$", "x", "^a\"b", "\\d$", "a|^b$", "^\\\\+$", "^[^\"\\\\]{2}$", "^.{1,2}$"])},
            lambda: {"type": "string", "format": r.choice(["date", "time", "date-time", "uuid", "ipv4", "email"])},
            lambda: {"type": "integer", "minimum": r.randint(-120, 5), "maximum": r.randint(5, 1300)},
            lambda: {"type": "integer", "exclusiveMinimum": r.randint(-120, 5)},
            lambda: {"type": "number", "minimum": r.randint(-3, 5), "exclusiveMaximum": r.randint(6, 130)},
            lambda: {"type": "number", "exclusiveMinimum": r.choice([-1, 0, 1]), "maximum": 3},
            lambda: {"type": "number", "maximum": r.randint(-20, 20)},
            lambda: {"type": r.choice(["integer", "number", "boolean", "null"])},
            lambda: {"type": ["string", "null"]},
            lambda: {"enum": r.sample(["a", "é\"\\\n", 1, 2.5, None, True, {"k": [1]}, [], "\x01"], r.randint(1, 4))},
            lambda: {"const": r.choice(["x", 5, None, {"a": 1}])},
            lambda: r.choice([{}, True]),
        ])()
    if k < 0.75:
        names = r.sample(["a", "b", "ab", "é\"", "d\\", "name", "na", ""], r.randint(0, 4))
        s = {"type": "object", "properties": {n: schema(r, depth + 1) for n in names}, "required": [n for n in names if r.random() < 0.5]}
        if r.random() < 0.7:
            s["additionalProperties"] = r.choice([False, True, {"type": "integer"}])
        return s
    if k < 0.88:
        s = {"type": "array", "items": schema(r, depth + 1)}
        if r.random() < 0.5:
            s["minItems"] = r.randint(0, 2)
        if r.random() < 0.5:
            s["maxItems"] = r.randint(2, 4)
        if r.random() < 0.3:
            s["prefixItems"] = [schema(r, depth + 1) for _ in range(r.randint(1, 2))]
            if r.random() < 0.5:
                s["items"] = False
                s.pop("minItems", None)
        return s
    if k < 0.94:
        return {r.choice(["anyOf", "anyOf", "oneOf"]): [schema(r, depth + 1) for _ in range(r.randint(1, 3))]}
    return {"allOf": [{"type": "object", "properties": {"p": schema(r, depth + 1)}}, {"type": "object", "required": ["p"], "properties": {"q": schema(r, 3)}}]}


FIXED = [
    {"$defs": {"node": {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
                        "required": ["v", "kids"], "additionalProperties": False}}, "$ref": "#/$defs/node"},
    {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"]},
    {"oneOf": [{"type": "object", "properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind", "x"]},
               {"type": "object", "properties": {"kind": {"const": "b"}, "y": {"type": "string"}}, "required": ["kind"]}]},
    {"type": "object", "additionalProperties": {"type": "boolean"}},
    {"type": "array", "items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False},
]


def instance(r, depth=0):
    k = r.random()
    if depth > 2 or k < 0.6:
        return r.choice(["", "a", "ab", "xyz", "é", 0, 1, -3, 7, 130, 1300, 2.5, -0.25, True, None, "2024-02-28", "1.2.3.4"])
    if k < 0.8:
        return [instance(r, depth + 1) for _ in range(r.randint(0, 4))]
    return {n: instance(r, depth + 1) for n in r.sample(["a", "b", "ab", "na", "name", "zz", "p", "q", "kind"], r.randint(0, 3))}


def schema_cases(r, n):
    for s in FIXED + [schema(r) for _ in range(n)]:
        texts = [json.dumps(instance(r), ensure_ascii=r.random() < 0.5, separators=r.choice([(", ", ": "), (",", ":")])) for _ in range(30)]
        yield {"schema": s, "texts": texts, "samples": 6, "max": 400, "seed": r.randint(0, 10**9)}
    yield {"object": True, "texts": ["{}", "[]", "{\"a\": [1]}", "1", "{\"a\":01}", "{\"a\":1,}"], "samples": 40, "max": 400, "seed": 5}


def main():
    tool, n = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1500
    r = random.Random(int(sys.argv[3]) if len(sys.argv) > 3 else 1)
    cases = list(regex_cases(r, n)) + list(schema_cases(r, n // 2))
    for c in cases[:25] + cases[-15:]:
        c["check"], c["samples"] = True, min(c["samples"], 2)
    got = json.loads(subprocess.run([tool, TOKENIZER], input=json.dumps(cases).encode(), stdout=subprocess.PIPE, check=True).stdout)
    bad, drawn, ended, dead, refused = [], 0, 0, 0, {}
    for c, g in zip(cases, got):
        if "error" in g:
            refused[g["error"][:60]] = refused.get(g["error"][:60], 0) + 1
            if "regex" in c:
                bad.append((c["regex"], "refused", g["error"]))
            continue
        drawn += len(g["samples"])
        ended += sum(isinstance(x, str) for x in g["samples"])
        dead += sum(isinstance(x, dict) for x in g["samples"])
        if "regex" in c:
            p = re.compile(c["regex"], re.ASCII)
            for t, (whole, _) in zip(c["texts"], g["match"]):
                if whole != bool(p.fullmatch(t)):
                    bad.append((c["regex"], t, whole))
            bad += [(c["regex"], t, "drawn") for t in g["samples"] if isinstance(t, str) and not p.fullmatch(t)]
            continue
        v = jsonschema.Draft202012Validator(c.get("schema", {"type": "object"}), format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
        if isinstance(c.get("schema", {}), dict) and isinstance(c.get("schema", {}).get("items"), list):
            v = jsonschema.Draft7Validator(c["schema"])
        for t in [x for x in g["samples"] if isinstance(x, str)] + [t for t, (whole, _) in zip(c["texts"], g["match"]) if whole]:
            try:
                if not v.is_valid(json.loads(t)):
                    bad.append((c.get("schema"), t, "is not valid"))
            except ValueError as e:
                bad.append((c.get("schema"), t, f"is not JSON: {e}"))
    for b in bad[:20]:
        print(b)
    print(f"refused: {refused}")
    print(f"{len(cases)} grammars, {drawn} texts drawn, {ended} ended, {dead} without a next token, {len(bad)} differences")
    return bool(bad) or ended < drawn // 2


if __name__ == "__main__":
    sys.exit(main())
