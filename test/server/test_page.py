"""The page at /, in a real browser where there is one (Debian: chromium)."""
import browser
from harness import EARLY, FINAL, SLOW, Server

WIDTHS = ((1200, 900, False), (1200, 900, True), (390, 800, False))


def test_root_by_what_is_asked():
    with Server(EARLY) as s:
        assert s.get("/") == (200, "Moult is running")
        status, page = s.get("/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}, raw=True)
        assert status == 200 and page == open("src/server/page.html", "rb").read()


def test_page_in_a_browser():
    if SLOW or not browser.CHROMIUM:  # and build/log/page-*.png are there to be looked at
        print("skip test_page_in_a_browser: " + ("once is enough" if SLOW else "no chromium"))
        return
    with Server(EARLY, "--served-model-name", "tiny <b>model</b>") as s:
        for width, height, dark in WIDTHS:
            with browser.Browser(width, height, dark) as b:
                b.open(f"http://127.0.0.1:{s.port}/")
                b.until("document.getElementById('version').textContent === 'default'")
                assert b.js("document.getElementById('model').textContent") == "tiny <b>model</b>"
                b.js("document.getElementById('temperature').value = 0; document.getElementById('tokens').value = 40;"
                     "document.getElementById('prompt').value = 'Tom has 3 apples and buys 4 more. How many?';"
                     "document.getElementById('send').click()")
                b.until("document.getElementById('send').disabled === false && document.getElementById('out').innerText.length > 60")
                assert "tok/s" in b.js("document.getElementById('speed').textContent")
                b.js("document.querySelector('[value=text]').click(); document.getElementById('prompt').value = 'Question: 1+1?\\nAnswer:';"
                     "document.getElementById('send').click()")
                b.until("document.getElementById('send').disabled === false && document.getElementById('out').innerText.includes('Answer:')")
                assert b.js("document.documentElement.scrollWidth <= innerWidth"), "wider than the window"
                b.until("document.getElementById('used').style.width !== ''")
                b.js("document.getElementById('tokens').value = 600; document.getElementById('send').click()")
                b.until("!document.getElementById('experts').hidden && document.getElementById('spread').textContent.includes('share')")
                b.picture(f"build/log/page-{width}{'-dark' if dark else ''}.png")
                assert not b.errors, b.errors
        with browser.Browser() as b:
            b.open(f"http://127.0.0.1:{s.port}/")
            b.until("document.getElementById('epoch').textContent === '1'")
            assert s.post("/update_weights_from_disk", {"model_path": FINAL, "weight_version": "v2"})[0] == 200
            b.until("document.getElementById('version').textContent === 'v2' && document.getElementById('epoch').textContent === '2'")
            b.js("document.querySelector('[value=text]').click(); document.getElementById('tokens').value = 3900;"
                 "document.getElementById('prompt').value = 'Question: There are 100';"
                 "document.getElementById('send').click()")
            b.until("document.getElementById('out').innerText.length > 60")
            b.js("document.getElementById('stop').click()")
            s.idle()
            b.until("document.getElementById('send').disabled === false")
    with Server(EARLY, "--api-key", "k") as s, browser.Browser() as b:
        b.open(f"http://127.0.0.1:{s.port}/health")
        status, _ = s.get("/", headers={"Accept": "text/html"}, raw=True)
        assert status == 200, "the page itself holds nothing secret; what it asks for needs the key"
        b.open(f"http://127.0.0.1:{s.port}/")
        b.until("document.getElementById('keyrow').hidden === false")
        b.js("document.getElementById('key').value = 'k'; document.getElementById('key').onchange()")
        b.until("document.getElementById('version').textContent === 'default'")
