"""Chromium without a window, driven through its debugging pipe (descriptors 3 and 4; messages end with a NUL)."""
import base64
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    def __init__(self, width=1200, height=900, dark=False):
        self.dir = tempfile.mkdtemp()
        to_r, self.to = os.pipe()
        self.frm, from_w = os.pipe()

        def descriptors():  # out of the way first: either may be 3 or 4
            a, b = fcntl.fcntl(to_r, fcntl.F_DUPFD, 100), fcntl.fcntl(from_w, fcntl.F_DUPFD, 100)
            os.dup2(a, 3), os.dup2(b, 4)
        self.proc = subprocess.Popen(
            [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-pipe", f"--user-data-dir={self.dir}", "about:blank"],
            preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_r), os.close(from_w)
        self.rest, self.n, self.errors = b"", 0, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(domain + ".enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def message(self):
        while b"\0" not in self.rest:
            data = os.read(self.frm, 1 << 16)
            assert data, "the browser has ended"
            self.rest += data
        one, _, self.rest = self.rest.partition(b"\0")
        return json.loads(one)

    def call(self, method, **params):
        self.n += 1
        m = {"id": self.n, "method": method, "params": params}
        if getattr(self, "session", None):
            m["sessionId"] = self.session
        os.write(self.to, json.dumps(m).encode() + b"\0")
        while True:
            r = self.message()
            if r.get("method") == "Runtime.exceptionThrown":
                self.errors.append(r["params"]["exceptionDetails"])
            if r.get("method") == "Log.entryAdded" and r["params"]["entry"]["level"] == "error":
                self.errors.append(r["params"]["entry"])
            if r.get("id") == self.n:
                assert "error" not in r, r
                return r["result"]

    def js(self, text):
        r = self.call("Runtime.evaluate", expression=text, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in r, r
        return r["result"].get("value")

    def until(self, text, limit=60):
        end = time.time() + limit
        while not self.js(text):
            assert time.time() < end, (text, self.js("document.body.innerText"))
            time.sleep(0.1)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def picture(self, path):
        with open(path, "wb") as f:
            f.write(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=False)["data"]))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.proc.kill()
        self.proc.wait()
        os.close(self.to), os.close(self.frm)
        shutil.rmtree(self.dir, ignore_errors=True)
