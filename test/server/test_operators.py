"""What operators need: metrics, keys, allowed paths, CORS, logs, the service manager, flags from files."""
import ctypes
import http.client
import json
import os
import re
import shutil
import socket
import tempfile
import threading
import time

from harness import EARLY, FINAL, MOULT, SLOW, Server, strict


def headers(s, method, path, **h):
    c = http.client.HTTPConnection("127.0.0.1", s.port, timeout=60)
    c.request(method, path, headers=h)
    r = c.getresponse()
    r.read()
    c.close()
    return r.status, {k.lower(): v for k, v in r.getheaders()}


LINE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)$')


def scrape(s):
    """Every sample by name and labels, after a check of the text format; prometheus_client agrees if it is there."""
    status, data = s.get("/metrics", raw=True)
    assert status == 200
    text, types, values = data.decode(), {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types, name
            types[name] = kind
        elif not line.startswith("# HELP "):
            m = LINE.match(line)
            assert m, line
            base = re.sub("_(bucket|sum|count)$", "", m[1])
            assert m[1] in types or types.get(base) == "histogram", line
            values[m[1], m[2]] = float(m[3])
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        print("skip prometheus_client is not installed")
    else:
        theirs = {(x.name, tuple(sorted(x.labels.items()))): x.value
                  for f in text_string_to_metric_families(text) for x in f.samples}
        assert len(theirs) == len(values), (len(theirs), len(values))
        assert all(x.startswith(("moult_", "sglang:")) for x, _ in theirs)
    return types, values


def test_metrics_count_what_happened():
    with Server(EARLY, "--served-model-name", 'a "b"\\c') as s:
        for _ in range(2):
            s.generate(list(range(100, 140)), 5, ignore_eos=True)
        label = 'model_name="a \\"b\\"\\\\c"'
        end = time.time() + 10  # the engine's numbers are published after the step, the answer may come before
        while scrape(s)[1]["moult_num_requests_total", label] < 2 and time.time() < end:
            pass
        types, v = scrape(s)
        assert v["moult_num_requests_total", label] == 2 and types["moult_num_requests_total"] == "counter"
        assert v["moult_generation_tokens_total", label] == 10
        assert v["moult_prompt_tokens_total", label] == 80
        assert v["moult_cached_tokens_total", label] == 32
        assert v["moult_num_running_reqs", label] == 0 and v["moult_weight_epoch", label] == 1
        for name, n in (("time_to_first_token", 2), ("e2e_request_latency", 2), ("queue_time", 2), ("inter_token_latency", 8)):
            h = f"moult_{name}_seconds"
            assert types[h] == "histogram" and v[h + "_count", label] == n, (h, v)
            assert v[h + "_bucket", label + ',le="+Inf"'] == n
            rising = [x for (m, _), x in v.items() if m == h + "_bucket"]
            assert rising == sorted(rising)
        assert 0 < v["moult_time_to_first_token_seconds_sum", label] <= v["moult_e2e_request_latency_seconds_sum", label]
        r = s.post("/update_weights_from_disk", {"model_path": FINAL})[1]
        assert s.post("/update_weights_from_disk", {"model_path": "/nowhere"})[0] == 400
        assert s.post("/stage_weights_from_disk", {"model_path": EARLY})[0] == 200
        assert s.post("/discard_staged_weights", {})[0] == 200
        types, v = scrape(s)
        assert v["moult_weight_epoch", label] == 2
        ended = {o: v["moult_weight_updates_ended_total", f'{label},outcome="{o}"']
                 for o in ("committed", "discarded", "replaced", "cancelled", "failed", "ruined")}
        assert ended == {"committed": 1, "discarded": 1, "failed": 1, "replaced": 0, "cancelled": 0, "ruined": 0}, ended
        for part, n in (("stage", 2), ("drain", 1), ("swap", 1)):
            h = f"moult_weight_update_{part}_seconds"
            assert types[h] == "histogram" and v[h + "_count", label] == n, (h, v[h + "_count", label])
            assert v[h + "_sum", label] >= r[part + "_s"] * 0.99 - 1e-6, (h, r)
        load = "moult_weight_load_duration_seconds"
        assert v[load + "_count", label + ',source="disk"'] == 1 and v[load + "_count", label + ',source="tensor"'] == 0
        assert abs(v[load + "_sum", label + ',source="disk"'] - r["stage_s"] - r["drain_s"] - r["swap_s"]) < 1e-5
    with Server(EARLY, "--metrics-prefix", "sglang", "--enable-metrics") as s:
        s.generate([5], 3, ignore_eos=True)
        _, v = scrape(s)
        names = {n for n, _ in v}
        for name in ("num_running_reqs", "num_queue_reqs", "num_used_tokens", "token_usage", "gen_throughput", "cache_hit_rate",
                     "prompt_tokens_total", "generation_tokens_total", "cached_tokens_total", "num_requests_total",
                     "num_aborted_requests_total", "max_total_num_tokens", "page_size", "engine_load_weights_time", "weight_updates_ended_total",
                     "weight_update_swap_seconds_count", "weight_load_duration_seconds_count"):
            assert "sglang:" + name in names, name
        seconds = next(x for (n, _), x in v.items() if n == "sglang:engine_load_weights_time")
        assert 0 < seconds < 60, seconds


def test_memory_usage():
    """As SGLang tells it: GiB of weights, of KV for so many tokens, of graphs."""
    stored = sum(os.path.getsize(os.path.join(EARLY, f)) for f in os.listdir(EARLY) if f.endswith(".safetensors"))
    config = json.load(open(os.path.join(EARLY, "config.json")))
    token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]  # K and V in BF16
    with Server(EARLY, "--max-total-tokens", "4096") as s:
        info = s.get("/server_info")[1]
        m = info["internal_states"][0]["memory_usage"]
        assert m["token_capacity"] == info["max_total_num_tokens"] == 4096, m
        assert abs(m["kvcache"] * 2**30 - 4096 * token) < 1024, (m, token)
        assert 0.98 * stored < m["weight"] * 2**30 < 1.1 * stored, (m, stored)
        assert m["graph"] == 0, m


def test_keys():
    """The admin key alone opens control routes; health and metrics need none."""
    with Server(EARLY, "--api-key", "user", "--admin-api-key", "boss", wait=False) as s:
        s.wait_ready()
        def status(path, key, body=None):
            h = {"Authorization": "Bearer " + key} if key else {}
            return (s.post(path, body, headers=h) if body is not None else s.get(path, headers=h, raw=True))[0]
        for path in ("/health", "/metrics"):
            assert status(path, None) == 200
        generate = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        assert [status("/generate", k, generate) for k in (None, "user", "boss", "use", "userr")] == [401, 200, 401, 401, 401]
        assert [status("/flush_cache", k, {}) for k in (None, "user", "boss")] == [401, 401, 200]
        assert [status("/update_weights_from_disk", k, {"model_path": FINAL}) for k in ("user", "boss")] == [401, 200]
    with Server(EARLY, "--admin-api-key", "boss") as s:
        assert s.generate([5], 1)["output_ids"]  # no other key is asked for
        assert s.post("/flush_cache", {})[0] == 401
    with Server(EARLY) as s:  # trainers send this whatever the server asks
        assert s.post("/flush_cache", {}, headers={"Authorization": "Bearer None"})[0] == 200


def test_allowed_paths():
    with tempfile.TemporaryDirectory() as root:
        inside, outside = os.path.join(root, "in"), os.path.join(root, "in-too")
        shutil.copytree(FINAL, os.path.join(inside, "m"))
        shutil.copytree(FINAL, outside)
        os.symlink(outside, os.path.join(inside, "link"))
        with Server(EARLY, "--allowed-path", inside, "--allowed-path", os.path.join(root, "absent")) as s:
            for path in (outside, os.path.join(inside, "link"), os.path.join(inside, "..", "in-too"), FINAL, "/", "org/none"):
                status, r = s.post("/update_weights_from_disk", {"model_path": path})
                assert status == 400 and "--allowed-path" in json.dumps(r), (path, status, r)
            for body, query in (({"file_path": "/etc/hostname"}, ""), ({}, "?file_path=/etc/hostname")):
                status, r = s.post("/update_weights_from_tensor" + query, body)
                assert status == 400 and "--allowed-path" in json.dumps(r), (body, query, r)
            assert s.post("/update_weights_from_disk", {"model_path": os.path.join(inside, "m")})[0] == 200


def test_cross_origin_calls():
    with Server(EARLY) as s:
        assert "access-control-allow-origin" not in headers(s, "GET", "/health")[1]
        assert headers(s, "OPTIONS", "/generate")[0] == 405
    with Server(EARLY, "--cors-origin", "https://page.example", "--api-key", "k") as s:
        status, h = headers(s, "OPTIONS", "/generate")
        assert status == 204 and h["access-control-allow-origin"] == "https://page.example"
        assert "Authorization" in h["access-control-allow-headers"]
        assert headers(s, "GET", "/model_info")[1]["access-control-allow-origin"] == "https://page.example"


def test_logs():
    with Server(EARLY, "--log-format", "json", "--log-requests", "--status-interval", "0.2") as s:
        s.generate([5, 6], 3, rid='a"b', ignore_eos=True)
        end = time.time() + 10
        while time.time() < end and "tok/s" not in s.text():
            time.sleep(0.05)
        lines = [strict(x) for x in s.text().splitlines()]
        assert all({"time", "level", "message"} <= set(x) for x in lines)
        asked = [x for x in lines if x.get("rid") == 'a"b']
        assert len(asked) == 1 and asked[0]["completion_tokens"] == 3 and asked[0]["prompt_tokens"] == 2, asked
        assert asked[0]["path"] == "/generate" and asked[0]["finish"] == "length" and asked[0]["weight_version"] == "default"
        assert 0 < asked[0]["first_token_s"] <= asked[0]["total_s"]
        assert any("running" in x["message"] and "tok/s" in x["message"] for x in lines), lines
        quiet = s.text().count("tok/s")
        time.sleep(0.7)
        assert s.text().count("tok/s") <= quiet + 1, "an idle server talks"


def test_service_manager():
    """READY=1 once it serves, STATUS, WATCHDOG=1 in time, STOPPING=1 on SIGTERM; by name and by path."""
    for abstract in (False, True):
        with tempfile.TemporaryDirectory() as root, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            name = "@moult-test-%d" % os.getpid() if abstract else os.path.join(root, "notify")
            sock.bind("\0" + name[1:] if abstract else name)
            sock.settimeout(30)
            os.environ.update(NOTIFY_SOCKET=name, WATCHDOG_USEC="200000")
            try:
                s = Server(EARLY, "--status-interval", "0.3", wait=False)
                got = [sock.recv(4096).decode()]
                assert got == ["READY=1"] and s.get("/health")[0] == 200
                while not any(x.startswith("STATUS=") for x in got) or "WATCHDOG=1" not in got:
                    got.append(sock.recv(4096).decode())
                s.proc.terminate()
                while got[-1] != "STOPPING=1":
                    got.append(sock.recv(4096).decode())
                s.stop()
            finally:
                del os.environ["NOTIFY_SOCKET"], os.environ["WATCHDOG_USEC"]


def refused(*flags, **env):
    import subprocess
    p = subprocess.run([MOULT, "serve", *flags], capture_output=True, text=True, timeout=60, env=dict(os.environ, **env))
    assert p.returncode == 2, p
    return p.stderr


def test_flags_from_a_file_and_the_environment():
    with tempfile.TemporaryDirectory() as root:
        path = os.path.join(root, "moult.conf")
        with open(path, "w") as f:
            f.write(f"# served at home\nmodel-path: {FINAL}\nserved_model_name = 'from file'\nlog-requests: false\n"
                    "weight-version: file\nmax_running_requests: 7\nincremental-streaming-output\n")
        os.environ["MOULT_WEIGHT_VERSION"] = "env"
        os.environ["MOULT_SERVED_MODEL_NAME"] = "from env"
        try:
            with Server(EARLY, "--config", path, "--served-model-name", "from flag") as s:
                assert s.get("/v1/models")[1]["data"][0]["id"] == "from flag"
                info = s.get("/server_info")[1]
                assert info["model_path"] == EARLY and info["weight_version"] == "env", info
                assert info["max_running_requests"] == 7
        finally:
            del os.environ["MOULT_WEIGHT_VERSION"], os.environ["MOULT_SERVED_MODEL_NAME"]
        for line, says in (("no-such-flag: 1", ":1: unknown flag"), ("port 1 2 3", "not name: value"),
                           ("log-requests: maybe", "takes true or false"), ("port: x", "--port")):
            with open(path, "w") as f:
                f.write(line + "\n")
            assert says in refused("--config", path), line
        assert "--config" in refused("--config", os.path.join(root, "none"))
        assert "--port" in refused("--model", EARLY, MOULT_PORT="70000")


def test_profile_is_a_trace():
    with tempfile.TemporaryDirectory() as root, Server(EARLY, "--chunked-prefill-size", "16") as s:
        assert s.post("/stop_profile", {})[0] == 400
        assert s.post("/start_profile", {"output_dir": os.path.join(root, "none")})[0] == 400
        assert s.post("/start_profile", {"output_dir": root})[0] == 200
        assert s.post("/start_profile", {"output_dir": root})[0] == 400
        s.generate(list(range(100, 150)), 10, ignore_eos=True)
        status, text = s.post("/stop_profile", {})
        assert status == 200 and "steps" in text, text
        (name,) = os.listdir(root)
        events = strict(open(os.path.join(root, name)).read())["traceEvents"]
        steps = [x for x in events if x["ph"] == "X"]
        assert sum(x["args"]["output_tokens"] for x in steps) == 10
        assert sum(x["args"]["prompt_tokens"] for x in steps) == 50
        assert [x["name"] for x in steps] == ["prefill"] * 3 + ["mixed"] + ["decode"] * 9, steps
        assert all(a["ts"] + a["dur"] <= b["ts"] + 0.01 for a, b in zip(steps, steps[1:])), "steps overlap"
        assert s.post("/start_profile", {"output_dir": root, "num_steps": 2})[0] == 200
        s.generate([5], 6, ignore_eos=True)
        assert "2 steps" in s.post("/stop_profile", {})[1]


def replay(s, path, *flags):
    import subprocess
    p = subprocess.run([MOULT, "replay", "--file", path, "--url", f"http://127.0.0.1:{s.port}", *flags],
                       capture_output=True, text=True, timeout=300)
    return p.returncode, dict(x.split(": ", 1) for x in p.stdout.splitlines()), p.stderr


def test_record_and_replay():
    """Unseeded, batched, streamed and chat requests give the same again; other weights do not, and are told."""
    with tempfile.TemporaryDirectory() as root:
        with Server(EARLY, "--record", root) as s:
            sp = {"max_new_tokens": 60, "temperature": 1.2, "ignore_eos": True}  # long enough to differ elsewhere
            s.post("/generate", {"input_ids": [5, 6], "sampling_params": sp})
            s.post("/generate", {"input_ids": [[5], [6, 7]], "sampling_params": dict(sp, n=2)})
            s.post("/generate", {"text": ["a", "b\0\u20ac"], "sampling_params": [sp, dict(sp, sampling_seed=9)]})
            s.stream("/generate", {"input_ids": [9], "sampling_params": sp})
            s.post("/v1/completions", {"prompt": "x", "max_tokens": 8, "temperature": 1, "n": 2})
            s.stream("/v1/chat/completions", {"messages": [{"role": "user", "content": "y"}], "max_tokens": 8})
            assert s.post("/generate", {"input_ids": []})[0] == 400
            s.post("/generate", "{")
        (name,) = os.listdir(root)
        path = os.path.join(root, name)
        assert os.stat(path).st_mode & 0o777 == 0o600
        lines = [strict(x) for x in open(path)]
        assert sum("in" in x for x in lines) == 8 and sum("out" in x for x in lines) == 11, lines
        with Server(EARLY) as s:
            code, said, err = replay(s, path, "--speed", "0")
            assert code == 0 and said["Same"] == "7" and said["Different"] == said["Another status"] == "0", (said, err)
            t = time.time()
            code, said, err = replay(s, path, "--speed", "0.5", "--parallel", "1")
            times = [x["at"] for x in lines if "in" in x][:-1]  # the last one's body is no object
            assert code == 0 and time.time() - t >= 2 * (times[-1] - times[0]), (said, err)
        with Server(FINAL) as s:
            code, said, err = replay(s, path)
            assert code == 1 and int(said["Different"]) >= 3 and "another answer" in err, (said, err)
            with open(path, "a") as f:
                f.write('{"in": "cut')
            assert replay(s, path)[1]["Same"] == said["Same"]
            with open(path, "a") as f:
                f.write("\n")
            assert replay(s, path)[0] == 1
    with Server(EARLY, "--record", "/nowhere", wait=False) as s:
        assert s.proc.wait(30) == 1 and "record" in s.text()
        s.proc.returncode = 0


def test_expert_load_counts_tokens():
    """Each token goes to top_k experts of every sparse layer; counted while somebody looks, equal to routed_experts."""
    with Server(EARLY, "--enable-return-routed-experts", "--disable-radix-cache") as s:
        first = s.get("/expert_load")[1]["counts"]
        assert not any(map(any, first))
        config = json.load(open(EARLY + "/config.json"))
        layers, experts, k = config["num_hidden_layers"], config["num_experts"], config["num_experts_per_tok"]
        r = s.post("/generate", {"input_ids": list(range(100, 140)), "return_routed_experts": True,
                                 "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}})[1]
        import base64
        import struct
        data = base64.b64decode(r["meta_info"]["routed_experts"])
        ids = struct.unpack(f"<{len(data) // 4}i", data)
        want = [[0] * experts for _ in range(layers)]
        for i, e in enumerate(ids):
            want[i // k % layers][e] += 1
        counts = s.get("/expert_load")[1]["counts"]
        assert counts == want and sum(map(sum, want)) == 45 * layers * k


def engine_thread(s):
    tasks = f"/proc/{s.proc.pid}/task"
    for t in os.listdir(tasks):
        with open(f"{tasks}/{t}/comm") as f:
            if f.read() == "engine\n":
                return int(t)
    raise AssertionError("no thread is called engine")


def test_stalled_step():
    """A step that does not end turns /health to 503 within 15 s, at once answered, and back when steps end again."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def ptrace(what, thread):
        return libc.ptrace(what, thread, None, None) == 0

    attach, detach = 16, 17  # PTRACE_*: stops one thread and leaves the others
    with Server(EARLY) as s:
        thread, got = engine_thread(s), []
        alone = s.generate([5, 6], 64, ignore_eos=True)
        t = threading.Thread(target=lambda: got.append(s.generate([5, 6], 64, ignore_eos=True)))
        if not ptrace(attach, thread):
            print("skip test_stalled_step: ptrace of a child is not allowed here")
            return
        try:
            os.waitpid(thread, 0x40000000)  # __WALL
            t.start()
            stalled, since = None, time.time()
            while time.time() - since < 15 and stalled is None:
                asked = time.time()
                status, r = s.get("/health")
                assert time.time() - asked < 5
                if status == 503:
                    stalled = r
                time.sleep(0.1)
            assert stalled == {"status": "stuck"}, stalled
            assert s.get("/health_generate")[0] == 503
        finally:
            ptrace(detach, thread)
        t.join()
        assert got[0]["output_ids"] == alone["output_ids"]
        assert s.get("/health")[0] == 200
