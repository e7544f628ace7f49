"""What differs on a GPU: choosing it, its memory plan, updates staged where the flag says.  Without one all is skipped."""
import json
import os
import re
import shutil
import subprocess
import tempfile

from harness import EARLY, FINAL, MOULT, Server, signature

UPDATE, STAGE, COMMIT = "/update_weights_from_disk", "/stage_weights_from_disk", "/commit_weights"


def no_gpu():
    p = subprocess.run([MOULT, "check-gpu"], capture_output=True, text=True, timeout=120)
    if p.returncode == 0:
        return False
    assert any(w in p.stderr for w in ("no CUDA driver", "built without CUDA", "no GPU", "too old", "compute capability")), p
    assert p.returncode == 1
    print("skip", p.stderr.strip())
    return True


def check(*flags, model=EARLY):
    return subprocess.run([MOULT, "serve", "--model-path", model, "--check", *flags], capture_output=True, text=True, timeout=120)


def mode(p):
    for says, name in (("staged in the device's memory", "device"), ("of host memory, pinned", "host"), ("updates: in place", "off")):
        if p.returncode == 0 and says in p.stderr:
            return name
    assert p.returncode == 1 and "does not fit" in p.stderr, p.stderr
    return "refused"


def test_check_gpu():
    """Every word agrees; the table says of what."""
    if no_gpu():
        return
    p = subprocess.run([MOULT, "check-gpu"], capture_output=True, text=True, timeout=120)
    assert "all words agree" in p.stdout and p.stderr == "", p
    for what in ("GEMM, bf16", "GEMM, nvfp4", "GEMM, fp8-block", "combine of experts", "tiles and back"):
        assert re.search(re.escape(what) + r" +\d+ +0\n", p.stdout), (what, p.stdout)


def test_choice():
    """A model whose shape the kernels do not take: the CPU serves and says why; asked for by name it is an error."""
    if no_gpu():
        return
    with tempfile.TemporaryDirectory() as root:
        odd = os.path.join(root, "odd")
        os.mkdir(odd)
        for f in os.listdir(EARLY):
            if "safetensors" not in f:
                shutil.copy(os.path.join(EARLY, f), odd)
        config = json.load(open(os.path.join(odd, "config.json")))
        config["head_dim"] = 96
        json.dump(config, open(os.path.join(odd, "config.json"), "w"))
        p = check("--load-format", "dummy", "--device", "cuda", model=odd)
        assert p.returncode == 1 and "--device cuda: head_dim: 96" in p.stderr, p.stderr
        with Server(odd, "--load-format", "dummy") as s:
            text = s.text()
            assert "head_dim: 96; allowed on a GPU: 64, 128, 256; the CPU serves" in text, text
            assert s.generate([5, 6], 4, ignore_eos=True)["meta_info"]["completion_tokens"] == 4
    p = check("--device", "cpu")
    assert p.returncode == 0 and "staged in host memory" in p.stderr, p.stderr


def test_plan():
    """Each part is named; what does not fit is refused with them; auto goes to the host where KV would get too little."""
    if no_gpu():
        return
    p = check()
    for part in ("weights", "a step's buffers", "attention's parts", "graphs", "the driver", "KV", "staged in the device's memory",
                 "expected pause"):
        assert part in p.stderr, (part, p.stderr)
    p = check("--max-total-tokens", "1000000000")
    assert p.returncode == 1 and "KV of 1000000000 tokens does not fit" in p.stderr and "attention's parts" in p.stderr, p.stderr
    # 4,096 requests that should each have 1,024 tokens left: some GB of KV
    seen = [mode(check("--mem-fraction-static", str(x / 100), "--max-running-requests", "4096")) for x in (1, 2, 5, 10, 20, 40)]
    print("       ", seen)
    assert seen == sorted(seen, key=["refused", "host", "device"].index) and {"host", "device"} <= set(seen), seen
    for name in ("device", "host", "off"):
        assert mode(check("--update-staging", name)) == name


def test_modes():
    """Staged on the device, on the host, in place: equal to a fresh start, and a failed one changes nothing."""
    if no_gpu():
        return
    with Server(FINAL) as fresh:
        want = signature(fresh)
    for mode in ("device", "host", "off"):
        with tempfile.TemporaryDirectory() as root, Server(EARLY, "--update-staging", mode) as s:
            before = signature(s)
            cut = os.path.join(root, "cut")
            shutil.copytree(FINAL, cut)
            os.truncate(os.path.join(cut, "model-00001-of-00001.safetensors"), 5000000)
            for _ in range(2):
                assert s.post(UPDATE, {"model_path": cut})[0] == 400 and signature(s) == before, mode
                code, r = s.post(UPDATE, {"model_path": FINAL})
                assert code == 200 and signature(s) == want, (mode, r)
                assert s.post(STAGE, {"model_path": EARLY})[0] == 200 and signature(s) == want, mode
                assert s.post(COMMIT, {})[0] == 200 and signature(s) == before, mode


def test_release():
    """Memory given back and taken again, with and without the weights' bytes, in each mode."""
    if no_gpu():
        return
    for mode in ("device", "host", "off"):
        for flags in (["--enable-memory-saver"], ["--enable-memory-saver", "--enable-weights-cpu-backup"]):
            with Server(EARLY, "--update-staging", mode, *flags) as s:
                before = signature(s)
                for _ in range(2):
                    assert s.post("/release_memory_occupation", {})[0] == 200
                    assert s.post("/resume_memory_occupation", {})[0] == 200
                    if len(flags) == 2:
                        assert signature(s) == before, (mode, flags)
                    code, r = s.post(UPDATE, {"model_path": EARLY})
                    assert code == 200 and signature(s) == before, (mode, flags, r)
