"""A Moult server for tests: start on a free loopback port, ask it, stop it.  Standard library only."""
import http.client
import json
import os
import re
import socket
import subprocess
import time

MOULT = os.environ.get("MOULT", "build/moult")
SLOW = bool(os.environ.get("SLOW"))  # sanitizer builds: fewer repeats, longer limits
EARLY, FINAL = "models/tiny-moe-early", "models/tiny-moe"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    def __init__(self, model=FINAL, *flags, wait=True, before=None):
        self.port = free_port()
        self.log = open(f"build/log/server-{self.port}", "w+")
        self.t0 = time.time()
        self.proc = subprocess.Popen(
            [MOULT, "serve", "--model-path", model, "--port", str(self.port), *flags],
            stdout=self.log, stderr=subprocess.STDOUT, preexec_fn=before)
        if wait:
            self.wait_ready()

    def wait_ready(self, limit=120):
        while time.time() - self.t0 < limit:
            if self.proc.poll() is not None:
                raise AssertionError(f"server ended with {self.proc.returncode}: {self.text()}")
            try:
                if self.get("/health")[0] == 200:
                    self.ready_s = time.time() - self.t0
                    return
            except OSError:
                pass
            time.sleep(0.02)
        raise AssertionError("not ready: " + self.text())

    def text(self):
        self.log.flush()
        return open(self.log.name).read()[-4000:]

    def settle(self, limit=60):
        """Waits for what goes on after the start (memory for updates, made ready in the background): before
        memory or threads are counted."""
        end = time.time() + limit
        while "memory for updates is ready" not in self.text():
            assert time.time() < end, self.text()
            time.sleep(0.02)

    def cpu(self):
        """Processor seconds used so far: what work takes on a machine that is busy with other things too."""
        with open(f"/proc/{self.proc.pid}/stat") as f:
            user, system = f.read().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def generated(self):
        """Tokens drawn since the start."""
        text = self.request("GET", "/metrics", raw=True)[1].decode()
        return int(float(re.search(r"^moult_generation_tokens_total\S* (\S+)$", text, re.M).group(1)))

    def request(self, method, path, body=None, headers=None, timeout=300, raw=False):
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if body is not None and not isinstance(body, (bytes, str)):
            body = json.dumps(body)
        h = {"Content-Type": "application/json"} if body is not None else {}
        h.update(headers or {})
        c.request(method, path, body, h)
        r = c.getresponse()
        data = r.read()
        c.close()
        if raw:
            return r.status, data
        try:
            return r.status, strict(data)
        except ValueError:
            return r.status, data.decode("utf-8", "strict")

    def get(self, path, **k):
        return self.request("GET", path, **k)

    def post(self, path, body, **k):
        return self.request("POST", path, body, **k)

    def generate(self, prompt, max_new=16, logprobs=True, **k):
        body = {"return_logprob": logprobs}
        body["input_ids" if isinstance(prompt, list) else "text"] = prompt
        sp = {"temperature": 0, "max_new_tokens": max_new}
        for key in list(k):
            if key in ("rid", "stream", "return_logprob", "logprob_start_len", "top_logprobs_num",
                       "return_text_in_logprobs", "extra_key"):
                body[key] = k.pop(key)
        sp.update(k)
        body["sampling_params"] = sp
        status, r = self.post("/generate", body)
        assert status == 200, (status, r)
        return r

    def stream(self, path, body):
        """The data frames of an SSE answer, decoded."""
        status, data = self.post(path, dict(body, stream=True), raw=True)
        assert status == 200, (status, data)
        frames = [f[6:] for f in data.decode("utf-8", "strict").split("\n\n") if f]
        assert frames[-1] == "[DONE]", frames[-1:]
        return [strict(f) for f in frames[:-1]]

    def loads(self):
        return self.get("/v1/loads")[1]["loads"][0]

    def idle(self, limit=10):
        t = time.time()
        while time.time() - t < limit:
            load = self.loads()
            if load["num_running_reqs"] == 0 and load["num_waiting_reqs"] == 0:
                return
            time.sleep(0.02)
        raise AssertionError(f"not idle: {self.loads()}")

    def stop(self):
        if self.proc.poll() is None:
            self.proc.terminate()
            try:
                self.proc.wait(60)
            except subprocess.TimeoutExpired:
                self.proc.kill()
                raise AssertionError("SIGTERM did not end the server: " + self.text())
        assert self.proc.returncode == 0, (self.proc.returncode, self.text())

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind and self.proc.poll() is None:
            self.proc.kill()
        elif not kind:
            self.stop()


def strict(data):
    """JSON without NaN and Infinity, and no key twice."""
    def no(word):
        raise AssertionError("not JSON: " + word)

    def once(pairs):
        assert len({k for k, _ in pairs}) == len(pairs), f"a key comes twice: {[k for k, _ in pairs]}"
        return dict(pairs)
    return json.loads(data, parse_constant=no, object_pairs_hook=once)


def signature(server):
    """Ids and logprobs of fixed prompts: equal if and only if the weights in use are."""
    out = []
    for p in ([2046, 375, 198, 32, 430], [32] * 40, list(range(100, 180)), [1]):
        r = server.generate(p, 16, ignore_eos=True)
        out.append([r["output_ids"], r["meta_info"]["output_token_logprobs"]])
    return out
