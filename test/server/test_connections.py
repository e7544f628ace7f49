"""Connections: silent ones, clients that read slowly or never, thousands at once, and the limit of descriptors (C57)."""
import http.client
import json
import os
import resource
import socket
import sys
import tempfile
import threading
import time

import checkpoint
from harness import EARLY, SLOW, Server

sys.path.append(os.path.join(os.path.dirname(__file__), "..", "..", "bench"))
from front_end import NEXT, SIZE, cpu_by_thread, post  # noqa: E402


def stream(ids, tokens, **more):
    return post(dict(more, input_ids=ids, stream=True,
                     sampling_params={"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}))


def connect(s, buffer=None):
    c = socket.socket()
    if buffer:
        c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    c.settimeout(120)
    c.connect(("127.0.0.1", s.port))
    return c


def ended(c, limit):
    """Seconds until the other side closes, None if it does not within `limit`."""
    t = time.time()
    c.settimeout(limit)
    try:
        while c.recv(65536):
            pass
    except ConnectionResetError:
        pass
    except TimeoutError:
        return None
    return time.time() - t


def test_silent_connections():
    """--timeout-keep-alive: what says nothing, or not to its end, is closed; what a pause holds is at work."""
    with Server(EARLY, "--timeout-keep-alive", "1") as s:
        want = s.generate([5, 6], 8, ignore_eos=True)["output_ids"]
        assert s.post("/pause_generation", {"mode": "retract"})[0] == 200
        got, frames = [], []
        work = [threading.Thread(target=lambda: got.append(s.generate([5, 6], 8, ignore_eos=True)["output_ids"])),
                threading.Thread(target=lambda: frames.extend(s.stream("/generate", {
                    "input_ids": [5, 6], "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}})))]
        for t in work:
            t.start()
        quiet, half, body, used = (connect(s) for _ in range(4))
        half.sendall(b"POST /generate HT")
        body.sendall(post({"input_ids": [5]})[:-3])
        used.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
        began = time.time()
        for c in (quiet, half, body, used):
            assert ended(c, 20) is not None
        assert time.time() - began > 0.5
        time.sleep(1.5)
        assert s.post("/continue_generation", {})[0] == 200
        for t in work:
            t.join()
        assert got == [want] and frames[-1]["output_ids"] == want
    with Server(EARLY, "--timeout-keep-alive", "0") as s:
        assert ended(connect(s), 2.5) is None


def memory(s):
    with open(f"/proc/{s.proc.pid}/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


def times(s, out, tokens):
    """Gaps between the frames of one healthy stream."""
    c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=120)
    c.request("POST", "/generate", json.dumps({"input_ids": [7], "stream": True, "sampling_params": {
        "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}), {"Content-Type": "application/json"})
    r, at = c.getresponse(), []
    while line := r.readline():
        if line.startswith(b"data: {"):
            at.append(time.perf_counter())
            last = line
    out.append((len(json.loads(last[6:])["output_ids"]), [b - a for a, b in zip(at, at[1:])]))
    c.close()


def beside(s, n, tokens, read):
    """(median and 99th percentile of the gaps of 8 healthy streams), most memory beside n streams whose clients do
    read(clients) again and again, and the clients."""
    clients = [connect(s, 2048) for _ in range(n)]
    for i, c in enumerate(clients):
        c.sendall(stream([i % SIZE], tokens, return_logprob=True, top_logprobs_num=5))
    healthy, most, until = [], 0, time.time() + 120
    ts = [threading.Thread(target=times, args=(s, healthy, tokens // 2)) for _ in range(8)]
    for t in ts:
        t.start()
    while (any(t.is_alive() for t in ts) or s.loads()["num_running_reqs"]) and time.time() < until:
        most = max(most, memory(s))
        read(clients)
    for t in ts:
        t.join()
    assert s.loads()["num_running_reqs"] == 0, "the engine waits for a socket"
    assert [h[0] for h in healthy] == [tokens // 2] * 8
    gaps = sorted(g for h in healthy for g in h[1])
    return (gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100]), most, clients


def test_readers_that_stand_still():
    """Clients that never read, and ones that read 10 bytes a second: the engine goes on, memory stays what the replies
    need, the first kind is ended, and healthy streams beside them never wait.  (How much slower these go is printed.)"""
    n, tokens = (10, 200) if SLOW else (100, 500)
    seen = [0] * 4

    def everything(clients):
        for c in clients:
            c.setblocking(False)
            try:
                c.recv(1 << 20)
            except BlockingIOError:
                pass

    def little(clients):
        for i, c in enumerate(clients[:4]):
            seen[i] += len(c.recv(5))
        time.sleep(0.5)
    with tempfile.TemporaryDirectory() as root:
        model = checkpoint.chain(os.path.join(root, "m"), NEXT, size=SIZE)
        with Server(model, "--threads", "1", "--max-running-requests", "256", "--max-total-tokens", str((n + 16) * (tokens + 32)),
                    "--timeout-keep-alive", "2", "--log-level", "warning") as s:
            whole = len(s.request("POST", "/generate", {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 5, "sampling_params": {
                "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}, raw=True)[1])
            base, _, clients = beside(s, n, tokens, everything)
            for c in clients:
                c.close()
            s.idle(10)
            before, files = memory(s), len(os.listdir(f"/proc/{s.proc.pid}/fd"))
            now, most, clients = beside(s, n, tokens, little)
            # A reply is kept as text and in the frame that is being sent; each may have grown by half more than it holds.
            assert SLOW or most - before < n * (3 * whole + (96 << 10)), (most - before, n, whole)
            assert SLOW or now[1] < 1, now  # a step that waits for a reader takes until that one is ended
            print(f"  gaps of 8 healthy streams, median and p99 in ms: {1e3 * base[0]:.1f} {1e3 * base[1]:.1f}, "
                  f"beside readers that stand still {1e3 * now[0]:.1f} {1e3 * now[1]:.1f}")
            assert all(seen)
            end = time.time() + 20  # those that read a little may last
            while len(os.listdir(f"/proc/{s.proc.pid}/fd")) > files + 4:
                assert time.time() < end, "connections that do not move stay open"
                time.sleep(0.1)
            for c in clients:
                c.close()
            s.idle(10)


def test_limit_of_descriptors():
    """With 256 descriptors: 400 streams at once all end, those that do not fit wait; then everything is free again."""
    with tempfile.TemporaryDirectory() as root:
        model = checkpoint.chain(os.path.join(root, "m"), NEXT, size=SIZE)
        old = resource.getrlimit(resource.RLIMIT_NOFILE)
        s = Server(model, "--threads", "1", "--max-running-requests", "512", "--max-total-tokens", "32768", wait=False,
                   before=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (320, 320)))
        with s:
            s.wait_ready()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == old
            got = []

            def one(i):
                c = connect(s)
                c.sendall(stream([i % SIZE], 16).replace(b"Host: x", b"Host: x\r\nConnection: close"))
                data = b""
                while more := c.recv(65536):
                    data += more
                c.close()
                got.append(data)
            ts = [threading.Thread(target=one, args=(i,)) for i in range(100 if SLOW else 400)]
            for t in ts:
                t.start()
            for t in ts:
                t.join()
            assert all(b"[DONE]" in d for d in got) and len(got) == len(ts), [d[:200] for d in got if b"[DONE]" not in d][:3]
            idle = [connect(s) for _ in range(300)]  # more than it takes
            time.sleep(0.5)
            before = sum(cpu_by_thread(s.proc.pid).values())
            time.sleep(1.5)
            assert sum(cpu_by_thread(s.proc.pid).values()) - before < 0.3, "it spins at the limit"
            for c in idle:
                c.close()
            t = time.time()
            assert s.generate([5], 2)["output_ids"] == [NEXT[5], NEXT[NEXT[5]]]
            assert time.time() - t < 5, "it does not listen again"
            s.idle(10)


def test_idle_connections():
    """Thousands of connections that were used once cost no time, and new ones find their way between them."""
    n = 200 if SLOW else min(5000, resource.getrlimit(resource.RLIMIT_NOFILE)[1] // 2)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65536), hard))
    try:
        with Server(EARLY, "--threads", "1") as s:
            idle = []
            for _ in range(n):
                c = connect(s)
                c.sendall(b"GET /ping HTTP/1.1\r\nHost: x\r\n\r\n")
                idle.append(c)
            assert all(c.recv(300).startswith(b"HTTP/1.1 200") for c in idle)
            before = sum(cpu_by_thread(s.proc.pid).values())
            time.sleep(2)
            spent = sum(cpu_by_thread(s.proc.pid).values()) - before
            assert spent < 0.1 or SLOW, f"{spent} s of processor in 2 s"
            assert s.generate([5], 2)["output_ids"]
            for c in idle:
                c.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
