"""The description at /openapi.json against the server itself."""
import json
import os
import subprocess
import sys

from harness import EARLY, SLOW, Server

VALUES = {"string": "x", "integer": 3, "number": 0.5, "boolean": True, "object": {}, "array": [], "null": None}
GOOD = {"messages": [{"role": "user", "content": "x"}]}
# Routes that end or change the server in ways that the next call would notice.
SKIP = {"/release_memory_occupation", "/resume_memory_occupation", "/weights_checker"}


def operations(s):
    status, doc = s.get("/openapi.json")
    assert status == 200 and doc["openapi"].startswith("3.1")
    for path, item in doc["paths"].items():
        for method, op in item.items():
            yield path.replace("{id}", "x"), method.upper(), op


def test_description_is_whole():
    """Every route has a summary and is served with its methods; others are refused."""
    with Server(EARLY) as s:
        for path, method, op in operations(s):
            assert op["summary"], f"{path}: no row in openapi.c"
            if method == "GET" and path not in SKIP:
                assert s.get(path, raw=True)[0] in (200, 400, 404, 503), path
        for path in {p for p, _, _ in operations(s)}:
            assert s.request("DELETE", path)[0] == 405, path


def test_types_are_those_described():
    """A field of a type that is not described is a 4xx that names it; described types never give a 5xx."""
    wrong = []
    with Server(EARLY) as s:
        for path, method, op in operations(s):
            if "requestBody" not in op or path in SKIP:
                continue
            schema = op["requestBody"]["content"]["application/json"]["schema"]
            must = {k: GOOD.get(k, VALUES[schema["properties"][k]["type"][0]]) for k in schema.get("required", ())}
            for name, field in schema["properties"].items():
                for kind, value in VALUES.items():
                    if kind == "integer" and "number" in field["type"]:
                        continue
                    body = dict(must, **{name: value})
                    if path == "/generate" and name not in ("text", "input_ids"):
                        body["input_ids"] = [5]
                    if "max_tokens" in schema["properties"] and "max_tokens" not in body:
                        body["max_tokens"] = 1
                    body.setdefault("sampling_params", {"max_new_tokens": 1})
                    status, r = s.request(method, path, body, timeout=60)
                    if status >= 500 and status != 503 or kind not in field["type"] and not (
                            400 <= status < 500 and name in json.dumps(r)):
                        wrong.append((path, name, value, status, str(r)[:200]))
            if path == "/pause_generation":
                assert s.post("/continue_generation", {})[0] == 200
        assert s.generate([5], 1)["output_ids"]
    assert not wrong, "\n".join(map(str, wrong))


def test_schemathesis():
    """Requests made from the description by a program that is not ours; control routes too."""
    tool = os.path.join(os.path.dirname(sys.executable), "schemathesis")
    if SLOW or not os.path.exists(tool):
        print("skip test_schemathesis: " + ("a sanitizer build is slow" if SLOW else "schemathesis is not installed"))
        return
    examples = os.environ.get("SCHEMATHESIS_EXAMPLES", "8")
    with Server(EARLY, "--max-running-requests", "16") as s:
        p = subprocess.run([tool, "run", f"http://127.0.0.1:{s.port}/openapi.json", "--checks", "not_a_server_error,status_code_conformance",
                            "--max-examples", examples, "--seed", "6", "--exclude-path-regex", "pause_gen",  # what it holds would wait
                            "--phases", "fuzzing", "--mode", "all", "--request-timeout", "60"],
                           capture_output=True, text=True, timeout=600)
        assert p.returncode == 0, (p.stdout[-3000:], p.stderr[-2000:])
        assert s.generate([5], 1)["output_ids"]
