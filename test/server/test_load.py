"""Many at once: nothing lost, the accuracy of the model in the repository, shutdown under load."""
import re
import signal
import subprocess
import threading
import time

from harness import EARLY, FINAL, MOULT, SLOW, Server

DATA = "models/gsm-tiny.jsonl"
LONG = 400 if SLOW else 3000  # tokens; runs longer than the test waits before SIGTERM


def bench(s, *flags, n=1209):
    out = subprocess.run([MOULT, "bench", "gsm8k", "--data-path", DATA, "--num-questions", str(n), "--parallel", "1209",
                          "--skip-shots", "--num-shots", "8", "--max-new-tokens", "256", "--port", str(s.port), *flags],
                         capture_output=True, text=True, timeout=1200)
    assert out.returncode == 0, out.stdout + out.stderr
    accuracy = float(re.search(r"Accuracy: ([0-9.]+)", out.stdout).group(1))
    assert re.search(r"Invalid: ", out.stdout) and re.search(r"Latency: .* s", out.stdout)
    assert re.search(r"Output throughput: .* token/s", out.stdout)
    return accuracy


def test_accuracy_before_and_after_an_update():
    """1,209 at once; the half-trained weights, an update in place, the trained ones.  Same process."""
    n = 24 if SLOW else 1209
    with Server(EARLY) as s:
        early8, early0 = bench(s, n=n), bench(s, "--chat", n=n)
        if not SLOW:
            assert abs(early8 - 0.501) <= 0.025 and abs(early0 - 0.445) <= 0.025, (early8, early0)
        assert s.post("/update_weights_from_disk", {"model_path": FINAL})[0] == 200
        final8, final0 = bench(s, n=n), bench(s, "--chat", n=n)
        assert final8 >= 0.995 and final0 >= 0.995, (final8, final0)


def test_sigterm_drains():
    with Server(EARLY, "--drain-timeout", "60") as s:
        got = []
        t = threading.Thread(target=lambda: got.append(s.generate([5, 6], LONG, ignore_eos=True)))
        t.start()
        time.sleep(0.3)
        s.proc.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        status, r = s.post("/generate", {"text": "late"})
        assert status == 503 and "stopping" in r["message"], (status, r)
        assert s.get("/health")[0] == 503
        t.join()
        assert got and got[0]["meta_info"]["completion_tokens"] == LONG
    with Server(EARLY, "--drain-timeout", "0") as s:
        got = []
        t = threading.Thread(target=lambda: got.append(s.generate([5, 6], 3900, ignore_eos=True)))
        t.start()
        time.sleep(0.3)
        s.proc.send_signal(signal.SIGTERM)
        t.join()
        assert got and got[0]["meta_info"]["finish_reason"]["type"] == "abort"
