"""Who may call what: every route by every key and method, odd spellings of paths and keys (C55)."""
import http.client
import socket

from harness import EARLY, FINAL, Server

OPEN = {"/", "/health", "/health_generate", "/metrics"}
# Everything else that changes something needs the admin key; /weight_update_status tells paths and callers.
USERS = {"/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"}
METHODS = ("GET", "HEAD", "POST", "PUT", "OPTIONS", "DELETE")
KEYS = {"none": None, "wrong": "Bearer nobody", "part": "Bearer use", "more": "Bearer userx", "empty": "Bearer ", "bare": "user",
        "basic": "Basic user", "spaces": "Bearer  user", "user": "Bearer user", "admin": "Bearer boss", "other case": "Bearer BOSS"}


def ask(c, method, path, key):
    h = {"Authorization": key} if key is not None else {}
    if method in ("POST", "PUT"):
        h["Content-Type"] = "application/json"
    c.request(method, path, "[]" if method in ("POST", "PUT") else None, h)  # no object: never more than refused
    r = c.getresponse()
    return r.status, r.read()


def test_every_route_by_every_key():
    with Server(EARLY, "--api-key", "user", "--admin-api-key", "boss") as s:
        doc = s.get("/openapi.json", headers={"Authorization": "Bearer user"})[1]
        routes = {p.replace("{id}", "x"): v for p, v in doc["paths"].items()}
        control = {p for p, v in routes.items() if p not in OPEN | USERS and ({"post", "put"} & set(v) or "status" in p)}
        assert len(control) > 20 and {p for p, v in routes.items() for op in v.values() if "control" in op["tags"]} == control
        c, wrong = http.client.HTTPConnection("127.0.0.1", s.port, timeout=60), []
        for path in [*routes, "/nothing", "/v1/embeddings", "/hicache/x"]:
            takes = "admin" if path in control else "user"
            for method in METHODS:
                for name, key in KEYS.items():
                    if method == "GET" and name in ("user", "admin") and path in control:
                        continue  # may do what it is there for: below
                    status, body = ask(c, method, path, key)
                    if path in OPEN or name == takes:
                        ok = status != 401
                    else:
                        ok = status == 401 and (method == "HEAD" or body == b'{"error":"Unauthorized"}')
                    if path in routes and ok and status != 401:
                        served = method.lower() in routes[path] or method == "HEAD" and "get" in routes[path]
                        ok = (status == 405) == (not served)
                    if not ok:
                        wrong.append((method, path, name, status, body[:100]))
        assert not wrong, wrong[:10]
        for path in sorted(control):
            assert ask(c, "GET", path, KEYS["user"])[0] == 401, path


def test_spellings_of_a_control_route():
    """None of them gets by the key, and none is another way in."""
    body = b'{"model_path": "%s"}' % FINAL.encode()
    with Server(EARLY, "--api-key", "user", "--admin-api-key", "boss") as s:
        def raw(target, key, head=b""):
            with socket.create_connection(("127.0.0.1", s.port), timeout=60) as c:
                c.sendall(b"POST " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
                          b"Authorization: Bearer " + key + b"\r\n" + head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                data = b""
                try:
                    while more := c.recv(65536):
                        data += more
                except ConnectionResetError:
                    pass
                return int(data.split(b" ")[1]) if data else 0
        route = b"/update_weights_from_disk"
        spelled = (route, route + b"/", b"/" + route, b"/%75pdate_weights_from_disk", b"/%2e" + route, b"/." + route, b"/x/.." + route,
                   route.upper(), route + b"%00", route + b"?a=b", route + b"#a", b"http://127.0.0.1" + route, b"*", b"x" + route,
                   b"/v1/models/.." + route, b"/v1/models/..%2f.." + route)
        for target in spelled:
            for key in (b"user", b"", b"boss" * 300000, b"bos", b"boss,user"):
                assert raw(target, key) in (0, 400, 401, 404, 405, 413, 414, 431), (target, key[:9])
        assert raw(route, b"user", b"Authorization: Bearer boss\r\n") == 401  # the first counts
        assert s.get("/model_info", headers={"Authorization": "Bearer user"})[1]["model_path"] == EARLY
        assert raw(route, b"boss") == 200
        assert s.get("/model_info", headers={"Authorization": "Bearer user"})[1]["model_path"] == FINAL
        for target in spelled[1:]:
            assert raw(target, b"boss") in (200, 400, 401, 404, 405), target  # 401: no control route, and no key of its


def test_without_keys_it_listens_here():
    """No key is set: control routes are open, and the address is the machine's own."""
    with Server(EARLY) as s, open("/proc/net/tcp") as f:
        local = [line.split()[1] for line in f if line.split()[3] == "0A"]
        assert [x.split(":")[0] for x in local if x.endswith(":%04X" % s.port)] == ["0100007F"]
        assert s.post("/flush_cache", {}, headers={"Authorization": "Bearer None"})[0] == 200
