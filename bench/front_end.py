#!/usr/bin/env python3
"""What HTTP costs: thousands of streams of a model that costs nearly nothing, and clients that connect and leave.

    python3 bench/front_end.py streams [--streams 4096] [--tokens 64] [--clients 1] [--cores 0]
    python3 bench/front_end.py leave [--count 100000] [--threads 16]

streams: the server's threads share the cores of --cores; as many SSE streams of incremental frames as asked for are open
at once, each token a frame.  Every stream must have all of its tokens, in order (a token follows from the one before
it).  Printed: tokens a second, and the processor time by the name of the thread: `engine` and `compute` are the model,
the rest is the front end.
leave: clients that only connect, send half a request, or a whole one (streaming or not), and close by FIN or RST within
20 ms.  Afterwards the server must have the threads, descriptors and KV pages that it had before.
Also run by test/server/test_load.py, with small counts.  Standard library only.
"""
import argparse
import json
import multiprocessing
import os
import random
import resource
import selectors
import socket
import struct
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "test", "server"))
os.makedirs("build/log", exist_ok=True)
import checkpoint  # noqa: E402
from harness import Server  # noqa: E402

SIZE = 288
NEXT = {t: (t * 5 + 3) % SIZE for t in range(SIZE)}
TICK = os.sysconf("SC_CLK_TCK")


def post(body):
    data = json.dumps(body).encode()
    return (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
            + str(len(data)).encode() + b"\r\n\r\n" + data)


def cpu_by_thread(pid):
    """Seconds of processor time by the threads' names; threads of libmicrohttpd have the program's."""
    out = {}
    for t in os.listdir(f"/proc/{pid}/task"):
        try:
            with open(f"/proc/{pid}/task/{t}/stat") as f:
                s = f.read()
        except FileNotFoundError:
            continue
        name, fields = s[s.index("(") + 1:s.rindex(")")], s[s.rindex(")") + 2:].split()
        out[name] = out.get(name, 0) + (int(fields[11]) + int(fields[12])) / TICK
    return out


def listen(port, streams, first, tokens, result):
    """Opens `streams` streams at once and reads them to their ends; then checks what each one said."""
    poll, text, t0, t1 = selectors.DefaultSelector(), {}, None, 0.0
    for i in range(first, first + streams):
        c = socket.create_connection(("127.0.0.1", port))
        c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        text[c] = (i, [])
        poll.register(c, selectors.EVENT_READ)
    for c, (i, _) in text.items():
        c.sendall(post({"input_ids": [i % SIZE], "stream": True, "sampling_params": {
            "temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}))
    left = streams
    while left:
        ready = poll.select(60)
        if not ready:
            raise SystemExit(f"{left} streams said nothing for 60 s")
        for key, _ in ready:
            c = key.fileobj
            data = c.recv(1 << 18)
            t1 = time.monotonic()
            t0 = t0 or t1
            parts = text[c][1]
            parts.append(data)
            if not data or (data if len(data) > 4 else b"".join(parts[-5:])).endswith(b"0\r\n\r\n"):
                poll.unregister(c)
                left -= 1
    wrong = 0
    for c, (i, parts) in text.items():
        c.close()
        frames = [json.loads(line[6:]) for line in b"".join(parts).split(b"\n")
                  if line.startswith(b"data: {")]
        ids, want, last = [t for f in frames for t in f["output_ids"]], [], i % SIZE
        for _ in range(tokens):
            last = NEXT[last]
            want.append(last)
        wrong += ids != want
    result.send((streams, wrong, t0, t1))


def streams(count, tokens, clients=1, cores=None):
    """(tokens a second, streams that were wrong, seconds by thread)"""
    with tempfile.TemporaryDirectory() as root:
        model = checkpoint.chain(os.path.join(root, "m"), NEXT, size=SIZE)
        threads = str(len(cores)) if cores else "1"
        with Server(model, "--threads", threads, "--max-running-requests", str(count), "--max-total-tokens",
                    str(count * (tokens + 32)), "--incremental-streaming-output", "--log-level", "warning") as s:
            if cores:
                for t in os.listdir(f"/proc/{s.proc.pid}/task"):
                    os.sched_setaffinity(int(t), cores)
            before = cpu_by_thread(s.proc.pid)
            pipes = [multiprocessing.Pipe(False) for _ in range(clients)]
            part = [(count * k // clients, count * (k + 1) // clients) for k in range(clients)]
            jobs = [multiprocessing.Process(target=listen, args=(s.port, b - a, a, tokens, pipe[1]))
                    for (a, b), pipe in zip(part, pipes)]
            for j, pipe in zip(jobs, pipes):
                j.start()
                pipe[1].close()
            got = [pipe[0].recv() for pipe in pipes]
            for j in jobs:
                j.join()
            after = cpu_by_thread(s.proc.pid)
    seconds = max(g[3] for g in got) - min(g[2] for g in got)
    cpu = {k: v - before.get(k, 0) for k, v in after.items()}
    return count * tokens / seconds, sum(g[1] for g in got), cpu


def counts(pid):
    return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))


def come_and_go(port, n, seed):
    rng = random.Random(seed)
    for _ in range(n):
        c = socket.create_connection(("127.0.0.1", port))
        if rng.random() < 0.8:
            data = post({"input_ids": [rng.randrange(SIZE)] * rng.choice((1, 3, 40, 300)), "stream": rng.random() < 0.5,
                         "sampling_params": {"max_new_tokens": rng.choice((1, 20, 500)), "ignore_eos": True}})
            c.sendall(data if rng.random() < 0.8 else data[:rng.randrange(len(data))])
        if rng.random() < 0.7:
            time.sleep(rng.random() * 0.02)
        if rng.random() < 0.5:
            c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        c.close()


def leave(count, threads=16, seed=1):
    """Counts of the server before and after; raises when they differ or pages are missing."""
    with tempfile.TemporaryDirectory() as root:
        model = checkpoint.chain(os.path.join(root, "m"), NEXT, size=SIZE)
        with Server(model, "--threads", "1", "--max-running-requests", "16", "--max-total-tokens", "16384",
                    "--log-level", "warning") as s:
            s.generate([5], 2)
            s.idle(10)
            time.sleep(1)
            before = counts(s.proc.pid)
            ts = [threading.Thread(target=come_and_go, args=(s.port, count // threads, seed * 1000 + i))
                  for i in range(threads)]
            for t in ts:
                t.start()
            for t in ts:
                t.join()
            s.idle(60)
            assert s.post("/flush_cache", {})[0] == 200
            info, end = s.get("/server_info")[1], time.time() + 30
            assert info["kv_pages_free"] == info["kv_pages_total"], info
            while (after := counts(s.proc.pid)) > before and time.time() < end:
                time.sleep(0.1)
            assert after <= before, f"threads and descriptors: {before} before, {after} after"
            assert s.generate([5], 2)["output_ids"] == [NEXT[5], NEXT[NEXT[5]]]
    return before, after


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("streams", "leave"))
    p.add_argument("--streams", type=int, default=4096)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--clients", type=int, default=1, help="processes that read the streams")
    p.add_argument("--cores", help="of the server, 0,1,...")
    p.add_argument("--count", type=int, default=100000)
    p.add_argument("--threads", type=int, default=16)
    p.add_argument("--seed", type=int, default=1)
    o = p.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    t = time.time()
    if o.what == "leave":
        before, after = leave(o.count, o.threads, o.seed)
        print(f"{o.count} clients came and left in {time.time() - t:.0f} s, seed {o.seed}: (threads, descriptors) {before} before, "
              f"{after} after, every KV page free")
        return
    rate, wrong, cpu = streams(o.streams, o.tokens, o.clients, {int(c) for c in o.cores.split(",")} if o.cores else None)
    front = sum(v for k, v in cpu.items() if k not in ("engine", "compute"))
    print(f"{o.streams} streams of {o.tokens} tokens: {rate:.0f} tokens/s, {wrong} streams wrong")
    print("seconds of processor by thread: " + ", ".join(f"{k} {v:.2f}" for k, v in sorted(cpu.items()) if v >= 0.01))
    print(f"front end: {o.streams * o.tokens / max(front, 1e-9):.0f} tokens a second of one core")
    sys.exit(wrong != 0)


if __name__ == "__main__":
    main()
