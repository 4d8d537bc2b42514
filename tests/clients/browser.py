"""A page in headless Chromium, driven by its debugging protocol."""

import base64
import json
import subprocess
import time
import urllib.request

import websocket


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

    def press(self, key, code=None, number=0, modifiers=0, text=""):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, windowsVirtualKeyCode=number, modifiers=modifiers,
                      text=text if kind == "keyDown" else "")

    def type(self, text):
        self.run("document.getElementById('text').focus()")
        self.call("Input.insertText", text=text)
        self.press("Enter", number=13, text="\r")

    def point(self, selector, scroll=True):
        """Moves the mouse to an element, which is brought into sight."""
        x, y = self.run(f"(() => {{ const it = document.querySelector({json.dumps(selector)}); {'it.scrollIntoView();' if scroll else ''} const box = it.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; }})()")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shot(self):
        """A picture, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot")["data"])
