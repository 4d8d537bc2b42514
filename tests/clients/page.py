"""The web page in headless Chromium: a question is typed, its answer comes, hostile Markdown stays text.

    python page.py ADDRESS SCREENSHOT
"""

import base64
import json
import subprocess
import sys
import tempfile
import time
import urllib.request

import websocket

ADDRESS, SCREENSHOT = sys.argv[1:]


class Page:
    """A page that Chromium's debugging protocol drives."""

    def __init__(self, folder):
        self.browser = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
             "--remote-allow-origins=*", f"--user-data-dir={folder}", "about:blank"],
            stderr=subprocess.PIPE, text=True)
        port = next(line.split(":")[2].split("/")[0] for line in self.browser.stderr if "DevTools listening" in line)
        targets = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        target = next(target for target in targets if target["type"] == "page")
        self.socket = websocket.create_connection(target["webSocketDebuggerUrl"], timeout=60)
        self.calls = 0
        self.requests = []
        self.errors = []
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.calls += 1
        self.socket.send(json.dumps({"id": self.calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get("method") == "Runtime.exceptionThrown":
                self.errors.append(message["params"])
            if message.get("id") == self.calls:
                assert "error" not in message, message
                return message["result"]

    def run(self, script):
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script, seconds=60):
        end = time.time() + seconds
        while not self.run(script):
            assert time.time() < end, f"never: {script}: {self.errors} {self.run('document.body.innerText')}"
            time.sleep(0.1)

    def type(self, text):
        self.run("document.getElementById('text').focus()")
        self.call("Input.insertText", text=text)
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r" if kind == "keyDown" else "")

    def picture(self, path):
        data = self.call("Page.captureScreenshot")["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))


HOSTILE = """# Title
<img src=x onerror="window.harmed = 1"><script>window.harmed = 1</script>
[click](javascript:window.harmed=1) ![picture](http://example.com/x.png) [site](https://example.com/)
**bold** `<b>code</b>` | a
```html
<iframe src="http://example.com"></iframe>
```
- one
  - two
> quoted
"""

with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    page = Page(folder)
    try:
        page.call("Emulation.setDeviceMetricsOverride", width=1100, height=800, deviceScaleFactor=1, mobile=False)
        page.call("Page.navigate", url=ADDRESS)
        page.until("document.querySelectorAll('#model option').length > 0")
        page.type("Tell me a story about a lamp that cannot sleep")
        page.until("document.querySelector('.assistant small')?.textContent.includes('tokens')", 120)
        answer = page.run("document.querySelector('.assistant .body').textContent")
        assert len(answer) > 20, answer
        told = page.run("document.querySelector('.assistant small').textContent")
        page.picture(SCREENSHOT)

        # Stopped in the middle, asked again, kept by the browser.
        page.type("another one")
        page.until("document.querySelectorAll('.assistant').length === 2 && document.querySelectorAll('.assistant')[1].textContent.length > 30")
        page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape", code="Escape", windowsVirtualKeyCode=27)
        page.until("document.getElementById('send').textContent === 'Send'")
        page.call("Page.reload")
        page.until("document.querySelectorAll('.assistant').length === 2")

        # A phone: the list slides in, nothing is wider than the screen.
        page.call("Emulation.setDeviceMetricsOverride", width=375, height=700, deviceScaleFactor=2, mobile=True)
        assert page.run("document.documentElement.scrollWidth <= 375")
        page.run("document.getElementById('menu').click()")
        page.until("getComputedStyle(document.getElementById('sidebar')).visibility === 'visible'")

        # A hostile text makes no element but those of Markdown, runs nothing and loads nothing.
        kinds = page.run(
            "(async () => { const { show } = await import('/page/markdown.js'); const at = document.createElement('div');"
            f" document.body.append(at); show({json.dumps(HOSTILE)}, at); await new Promise((r) => setTimeout(r, 300));"
            " return [...new Set([...at.querySelectorAll('*')].map((e) => e.tagName))].concat([...at.querySelectorAll('a')].map((a) => a.href)); })()")
        assert not {"IMG", "SCRIPT", "IFRAME", "B"} & set(kinds), kinds
        assert {"H1", "STRONG", "CODE", "PRE", "UL", "BLOCKQUOTE"} <= set(kinds), kinds
        assert [kind for kind in kinds if ":" in kind and "javascript" in kind] == [], kinds
        assert page.run("window.harmed") is None
        foreign = [url for url in page.requests if not url.startswith((ADDRESS, "data:", "about:"))]
        assert foreign == [], foreign
        assert page.errors == [], page.errors
        print(f"page: {told}; {len(page.requests)} requests, all to the server; screenshot in {SCREENSHOT}")
    finally:
        page.browser.kill()
        page.browser.wait()
