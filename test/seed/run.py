"""SGLang's update test against our server, for every form of checkpoint that is at hand.

    python3 test/seed/run.py [word ...]      only the forms whose name holds one of the words

What test_update_weights_from_disk_blackwell.py of SGLang does: start with the model, ask greedily, take
text, ids and logprobs; then, for flush_cache true and false, wait until idle, update with the same
model, and compare.  There a logprob may move by 1e-4; here by 0.  Each form runs under SGLang's two
runner names, and both must also give each other's bits.

Forms: models/, the folders of ../shared/models/tiny-moe, and what `moult quantize` writes from the BF16
model: each format, the spellings of each tool, the last layer left in BF16, experts alone.
"""
import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "server"))
from harness import FINAL, MOULT, Server  # noqa: E402

SHARED = os.path.join("..", "shared", "models", "tiny-moe")
RUNNERS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")
PROMPT = "The capital of France is"
WRITTEN = (  # name, flags of moult quantize
    ("fp8-block", "--format fp8-block"), ("fp8-tensor", "--format fp8-tensor"),
    ("fp8-channel", "--format fp8-channel"), ("mxfp8", "--format mxfp8"),
    ("nvfp4", "--format nvfp4"), ("mxfp4", "--format mxfp4"),
    ("fp8-block last-1-bf16", "--format fp8-block --bf16-last-n 1"),
    ("nvfp4 last-1-bf16", "--format nvfp4 --bf16-last-n 1"),
    ("mxfp8 miles", "--format mxfp8 --spelling miles"),
    ("mxfp8 modelopt", "--format mxfp8 --spelling modelopt"),
    ("nvfp4 miles experts", "--format nvfp4 --spelling miles --experts-only"),
    ("nvfp4 compressed-tensors", "--format nvfp4 --spelling compressed-tensors"),
    ("fp8-channel compressed-tensors", "--format fp8-channel --spelling compressed-tensors"),
)
ACTS = {"fp8": "fp8_block", "nvfp4": "nvfp4", "mxfp8": "mxfp8"}  # on Blackwell; the static one needs scales


def answer(s, prompt):
    r = s.generate(prompt, 16, ignore_eos=True)
    meta = r["meta_info"]
    assert r["text"] and len(r["output_ids"]) == 16, r
    assert len(meta["output_token_logprobs"]) == 16
    return r["text"], r["output_ids"], [x[0] for x in meta["output_token_logprobs"]]


def signature(s):
    return [answer(s, p) for p in (PROMPT, [2046, 375, 198, 32, 430], list(range(100, 180)))]


def same(a, b):
    for (text, ids, logprobs), (text2, ids2, logprobs2) in zip(a, b):
        assert text == text2 and ids == ids2, (text, text2)
        assert max(abs(x - y) for x, y in zip(logprobs, logprobs2)) == 0


def idle(s):
    t = time.time()
    while time.time() - t < 30:
        status, r = s.get("/v1/loads?include=core")
        if status == 200 and all(x["num_running_reqs"] + x["num_waiting_reqs"] == 0 for x in r["loads"]):
            return
        time.sleep(0.02)
    raise AssertionError("not idle after 30 s")


def update(s, model, want):
    for flush in (True, False):
        idle(s)
        status, r = s.post("/update_weights_from_disk",
                           {"model_path": model, "flush_cache": flush, "abort_all_requests": False},
                           timeout=240)
        assert status == 200 and r["success"] is True, r
        assert s.get("/get_model_info")[1]["model_path"] == model
        same(want, signature(s))


def check(model, flags=(), runners=RUNNERS):
    first = None
    for runner in runners:
        with Server(model, "--moe-runner-backend", runner, "--max-total-tokens", "4096", *flags) as s:
            assert s.get("/get_model_info")[1]["model_path"] == model
            want = signature(s)
            same(want, signature(s))
            update(s, model, want)
            first = first or want
            same(first, want)
    return first


def refused(model, name):
    """The routed runner takes no such experts in SGLang, and says so."""
    s = Server(model, "--moe-runner-backend", RUNNERS[1], wait=False)
    assert s.proc.wait(60) != 0 and name in s.text(), s.text()


def forms(root):
    yield "bf16", FINAL, None
    for name in ("fp8", "nvfp4", "mxfp8-last1-bf16"):
        d = os.path.join(SHARED, name)
        if os.path.isdir(d):
            yield name + " (given)", d, ACTS[name.split("-")[0]]
        else:
            print("skip   ", d, "is not here", flush=True)
    for name, flags in WRITTEN:
        d = os.path.join(root, name.replace(" ", "-"))
        subprocess.run([MOULT, "quantize", FINAL, d, *flags.split()], check=True,
                       stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield name, d, {"mxfp8": "mxfp8", "nvfp4": "nvfp4-per-token"}.get(name.split()[0])
        shutil.rmtree(d)


def run(name, model, act):
    if name.split()[0] in ("mxfp4", "fp8-channel"):
        refused(model, name.split()[0])
        check(model, runners=("fused", "routed"))
        return
    plain = check(model)
    if act:
        rounded = check(model, ("--activation-format", act))
        assert rounded != plain, "the activation format changed nothing"


def scales(root):
    """Static NVFP4 activations: an update that brings no input_scale is refused, and disturbs nothing."""
    d = os.path.join(root, "without")
    subprocess.run([MOULT, "quantize", FINAL, d, "--format", "nvfp4"], check=True,
                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with Server(os.path.join(SHARED, "nvfp4"), "--activation-format", "nvfp4") as s:
        want = signature(s)
        status, r = s.post("/update_weights_from_disk", {"model_path": d})
        assert status == 400 and r["success"] is False, r
        assert "input_scale" in r["message"] and "nvfp4-per-token" in r["message"], r
        same(want, signature(s))
    s = Server(d, "--activation-format", "nvfp4", wait=False)
    assert s.proc.wait(60) != 0 and "nvfp4-per-token needs none" in s.text(), s.text()
    with Server(d, "--activation-format", "nvfp4-per-token") as s:
        assert "activations: nvfp4-per-token (the checkpoint's recipe implies nvfp4-per-token)" in s.text()


def main():
    words, passed, failed = sys.argv[1:], 0, 0
    os.makedirs("build/log", exist_ok=True)
    with tempfile.TemporaryDirectory() as root:
        jobs = ((name, run, (name, model, act)) for name, model, act in forms(root))
        if os.path.isdir(os.path.join(SHARED, "nvfp4")):
            jobs = itertools.chain(jobs, [("input scales", scales, (root,))])
        for name, job, args in jobs:
            if words and not any(w in name for w in words):
                continue
            t = time.time()
            try:
                job(*args)
                passed += 1
                print(f"ok      seed {name} ({time.time() - t:.1f} s)", flush=True)
            except Exception:
                failed += 1
                print(f"FAILED  seed {name}\n{traceback.format_exc()}", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
