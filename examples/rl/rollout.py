"""A Moult server as a trainer sees it: start, sample with log-probabilities, update, judge answers.

Standard library and numpy only.
"""
import base64
import bisect
import http.client
import json
import os
import re
import socket
import subprocess
import time

import numpy as np

PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


class Sample:
    """One answer: ids of prompt and answer, the server's log-probabilities of the answer's ids and their texts,
    the text, and with routed experts [ids - 1, layers, top_k] of every token but the last."""

    def __init__(self, prompt, reply):
        meta = reply["meta_info"]
        self.prompt, self.ids, self.text = prompt, prompt + reply["output_ids"], reply["text"]
        self.logprobs = [t[0] for t in meta["output_token_logprobs"]]
        self.pieces = [t[2] for t in meta["output_token_logprobs"]]
        self.version, self.finish, self.routes = meta["weight_version"], meta["finish_reason"]["type"], None
        if meta.get("routed_experts"):
            flat = np.frombuffer(bytearray(base64.b64decode(meta["routed_experts"])), "<i4")
            self.routes = flat.reshape(len(self.ids) - 1, -1)


class Client:
    def __init__(self, url):
        self.host, self.port = url.split("//")[-1].rstrip("/").split(":")
        self.layers = None

    def ask(self, method, path, body=None, timeout=3600):
        c = http.client.HTTPConnection(self.host, int(self.port), timeout=timeout)
        c.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        data = r.read()
        c.close()
        if r.status != 200:
            raise RuntimeError(f"{method} {path}: {r.status} {data[:500].decode(errors='replace')}")
        return json.loads(data) if data else None

    def ids(self, texts):
        return self.ask("POST", "/tokenize", {"prompt": texts})["tokens"]

    def sample(self, prompts, n, most, seed, routes=False, temperature=1.0):
        """n Samples of each prompt, prompt by prompt; log-probabilities are those at this temperature."""
        params = [{"n": n, "temperature": temperature, "max_new_tokens": most, "sampling_seed": seed * 1000003 + i}
                  for i in range(len(prompts))]
        body = {"input_ids": prompts, "return_logprob": True, "return_text_in_logprobs": True, "sampling_params": params}
        if routes:
            body["return_routed_experts"] = True
        r = self.ask("POST", "/generate", body)
        return [[Sample(p, x) for x in r[i * n:i * n + n]] for i, p in enumerate(prompts)]

    def accuracy(self, rows, most=256):
        """Share of problems answered right, greedy."""
        r = self.ask("POST", "/generate", {"text": [PROMPT.format(p["question"]) for p in rows],
                                           "sampling_params": {"temperature": 0, "max_new_tokens": most}})
        return sum(right(x["text"], p["answer"]) for x, p in zip(r, rows)) / len(rows)

    def update(self, folder, version):
        r = self.ask("POST", "/update_weights_from_disk",
                     {"model_path": os.path.abspath(folder), "weight_version": version, "flush_cache": True})
        if not r["success"]:
            raise RuntimeError(r["message"])
        return r


class Server(Client):
    """`moult serve` as a child on a free port."""

    def __init__(self, moult, model, *flags, log=subprocess.DEVNULL):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        super().__init__(f"127.0.0.1:{port}")
        self.process = subprocess.Popen([moult, "serve", "--model-path", model, "--port", str(port), *flags],
                                        stdout=log, stderr=subprocess.STDOUT)
        while True:
            try:
                self.ask("GET", "/health")
                return
            except (OSError, RuntimeError):
                if self.process.poll() is not None:
                    raise RuntimeError(f"{moult} serve ended with {self.process.returncode}") from None
                time.sleep(0.05)

    def cpu(self):
        """Seconds of processor time so far, user and system."""
        with open(f"/proc/{self.process.pid}/stat") as f:
            field = f.read().rsplit(")", 1)[1].split()
        return (int(field[11]) + int(field[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def last_number(text):
    """As `moult bench gsm8k` judges: the last run of digits, without commas."""
    found = re.findall(r"\d+", text.replace(",", ""))
    return found[-1] if found else None


def right(text, answer):
    return last_number(text) == last_number(answer)


def notes(sample):
    """The notes <<a+b=c>> of an answer: (its tokens up to the end of the note, whether the note is true)."""
    text, ends = "", []
    for piece in sample.pieces:
        text += piece or ""
        ends.append(len(text))
    out = []
    for m in re.finditer(r"<<(\d+)([-+*/])(\d+)=(\d+)>>", text):
        a, b, c = int(m[1]), int(m[3]), int(m[4])
        true = {"+": a + b == c, "-": a - b == c, "*": a * b == c, "/": b > 0 and a == b * c}[m[2]]
        out.append((bisect.bisect_left(ends, m.end()) + 1, true))
    return out
