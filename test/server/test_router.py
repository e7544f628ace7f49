"""sglang-router (the wheel that slime pins) in front of two servers: it finds, uses, loses and forgets workers."""
import http.client
import importlib.util
import json
import signal
import subprocess
import sys
import threading
import time

from harness import EARLY, FINAL, SLOW, Server, free_port, strict


class Router:
    def __init__(self, *flags):
        self.port = free_port()
        self.log = open(f"build/log/router-{self.port}", "w+")
        self.proc = subprocess.Popen(
            [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(self.port),
             "--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--health-check-interval-secs", "1",
             "--health-failure-threshold", "1", *flags], stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.proc.terminate()
        try:
            self.proc.wait(20)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    def ask(self, method, path, body=None):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        c.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        data = r.read()
        c.close()
        try:
            return r.status, strict(data)
        except ValueError:
            return r.status, data.decode()

    def workers(self):
        return self.ask("GET", "/workers")[1]["workers"]

    def wait(self, n, limit=60):
        """Until n workers are healthy."""
        end = time.time() + limit
        while time.time() < end:
            assert self.proc.poll() is None, open(self.log.name).read()[-3000:]
            try:
                if sum(w["is_healthy"] for w in self.workers()) == n:
                    return
            except (OSError, KeyError, TypeError):
                pass
            time.sleep(0.1)
        raise AssertionError(f"not {n} healthy workers: {open(self.log.name).read()[-3000:]}")


def url(s):
    return f"http://127.0.0.1:{s.port}"


def deltas(text):
    frames = [f[6:] for f in text.split("\n\n") if f]
    assert frames[-1] == "[DONE]", frames[-1:]
    return [strict(f) for f in frames[:-1]]


def absent(test):
    if importlib.util.find_spec("sglang_router"):
        return False
    print(f"skip {test}: sglang-router is not installed")
    return True


ASK = {"input_ids": [2046, 375, 198], "return_logprob": True,
       "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}}
CHAT = {"model": FINAL, "messages": [{"role": "user", "content": "There are 3 cats and 4 dogs. How many animals?"}],
        "max_tokens": 12, "temperature": 0}


def test_router_serves():
    """Every route through the router says what the worker says; both workers get their part."""
    if absent("test_router_serves"):
        return
    with Server(FINAL) as a, Server(FINAL) as b, Router("--worker-urls", url(a), url(b), "--policy", "round_robin") as r:
        r.wait(2)
        for w in r.workers():
            assert w["model_id"] == FINAL and w["worker_type"] == "regular" and w["metadata"]["tp_size"] == "1", w
        assert r.ask("GET", "/health")[0] == r.ask("GET", "/health_generate")[0] == 200
        assert r.ask("GET", "/get_model_info")[1]["model_path"] == FINAL
        assert [m["id"] for m in r.ask("GET", "/v1/models")[1]["data"]] == [FINAL]
        want = a.post("/generate", ASK)[1]
        chat = a.post("/v1/chat/completions", CHAT)[1]["choices"][0]
        before = [s.get("/server_info")[1]["steps"] for s in (a, b)]
        for _ in range(4):
            status, got = r.ask("POST", "/generate", ASK)
            assert status == 200 and got["output_ids"] == want["output_ids"], got
            assert got["meta_info"]["output_token_logprobs"] == want["meta_info"]["output_token_logprobs"]
            assert got["meta_info"]["weight_version"] == "default"
            last = deltas(r.ask("POST", "/generate", dict(ASK, stream=True))[1])[-1]
            assert last["output_ids"] == want["output_ids"] and last["text"] == want["text"]
            c = r.ask("POST", "/v1/chat/completions", CHAT)[1]["choices"][0]
            assert c["message"]["content"] == chat["message"]["content"], c
            parts = deltas(r.ask("POST", "/v1/chat/completions", dict(CHAT, stream=True))[1])
            assert "".join(p["choices"][0]["delta"].get("content") or "" for p in parts) == chat["message"]["content"]
        after = [s.get("/server_info")[1]["steps"] for s in (a, b)]
        assert all(x > y for x, y in zip(after, before)), (before, after)
        body = {"model": FINAL, "prompt": "x", "max_tokens": 4, "temperature": 0}
        plain = r.ask("POST", "/v1/completions", body)[1]["choices"][0]["text"]
        assert "".join(p["choices"][0]["text"] for p in deltas(r.ask("POST", "/v1/completions", dict(body, stream=True))[1])) == plain
        status, e = r.ask("POST", "/generate", {"input_ids": [5], "sampling_params": {"temperature": -1}})
        assert status == 400 and "temperature" in json.dumps(e), e
        status, f = r.ask("POST", "/flush_cache", {})
        assert status == 200 and f["workers_flushed"] == 2, f
        assert all(w["load"] == 0 for w in r.ask("GET", "/get_loads")[1]["workers"])
        long = threading.Thread(target=a.generate, args=([5] * 100, 1000), kwargs={"ignore_eos": True})
        long.start()
        seen = 0
        while long.is_alive():
            seen = max(seen, *(w["load"] for w in r.ask("GET", "/get_loads")[1]["workers"]))
        long.join()
        assert 100 <= seen <= 1200, seen


def test_router_loses_workers():
    """A worker that drains, dies, is removed or comes back: no answer is lost, and those left do the work."""
    if absent("test_router_loses_workers"):
        return
    n = 200 if SLOW else 800
    with Server(EARLY) as a, Router("--policy", "round_robin", "--worker-urls", url(a)) as r:
        b = Server(EARLY, "--drain-timeout", "60")
        r.wait(1)
        assert r.ask("POST", "/workers", {"url": url(b), "worker_type": "regular"})[0] in (200, 202)
        r.wait(2)
        want = a.generate([5, 6], n, ignore_eos=True)["output_ids"]
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": n, "temperature": 0, "ignore_eos": True}}
        got, stop = [], threading.Event()

        def client():
            while not stop.is_set():
                got.append(r.ask("POST", "/generate", body))
        ts = [threading.Thread(target=client) for _ in range(6)]
        for t in ts:
            t.start()
        time.sleep(1)
        b.proc.send_signal(signal.SIGTERM)  # what runs there ends; the router turns to the other
        assert b.proc.wait(90) == 0, b.text()
        r.wait(1)
        time.sleep(0.5)
        stop.set()
        for t in ts:
            t.join()
        assert len(got) >= 6 and all(status == 200 for status, _ in got), [x for x in got if x[0] != 200][:2]
        assert all(x["output_ids"] == want for _, x in got)
        gone = next(w for w in r.workers() if w["url"] == url(b))
        assert r.ask("DELETE", "/workers/" + gone["id"])[0] in (200, 202)
        end = time.time() + 20
        while len(r.workers()) != 1 and time.time() < end:
            time.sleep(0.1)
        assert [w["url"] for w in r.workers()] == [url(a)]
        c = Server(EARLY)
        assert r.ask("POST", "/workers", {"url": url(c)})[0] in (200, 202)
        r.wait(2)
        c.proc.kill()  # no farewell
        c.proc.wait()
        for _ in range(6):
            status, x = r.ask("POST", "/generate", body)
            assert status == 200 and x["output_ids"] == want, (status, x)
        r.wait(1)
        only = r.workers()
        assert sorted(w["is_healthy"] for w in only) == [False, True]
