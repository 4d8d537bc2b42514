"""The picture of the page in README: docs/page.png, an answer with its tokens.

    python picture.py ADDRESS FILE

ADDRESS is a server's with the bundled model. Chromium and the package websocket-client are what tests/clients/page.py needs; Pillow
makes the file small.
"""

import io
import json
import pathlib
import sys
import tempfile

import PIL.Image

from browser import Page

ADDRESS, FILE = sys.argv[1], pathlib.Path(sys.argv[2])

with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    page = Page(folder)
    try:
        page.call("Emulation.setDeviceMetricsOverride", width=1000, height=640, deviceScaleFactor=1.5, mobile=False)
        page.call("Page.navigate", url=ADDRESS)
        page.run("localStorage.clear(); localStorage.setItem('delft.settings', JSON.stringify({ seed: 7 }))")
        page.call("Page.reload")
        page.until("document.querySelectorAll('#model option').length > 0")
        page.run("document.documentElement.dataset.theme = 'light'")
        page.type("Tell me a story about a lamp that cannot sleep")
        page.until("document.querySelector('.assistant small')?.textContent.includes('tokens')", 120)
        page.until("document.getElementById('send').textContent === 'Send'")
        page.run("[...document.querySelectorAll('.assistant .tools button')].find((one) => one.textContent === 'Tokens').click()")
        page.run("document.activeElement.blur()")
        # A token that had rivals.
        page.run("document.querySelectorAll('.tokens [data-level=\"3\"]')[1].id = 'shown'")
        page.point("#shown")
        page.run("document.getElementById('talk').scrollTop = 0")
        page.point("#shown", scroll=False)
        page.until("!document.querySelector('.about').hidden")
        image = PIL.Image.open(io.BytesIO(page.shot())).convert("RGB")
        image.quantize(64, method=PIL.Image.Quantize.MEDIANCUT, dither=PIL.Image.Dither.NONE).save(FILE, optimize=True)
        print(f"{FILE}: {FILE.stat().st_size // 1000} KB of {json.dumps(image.size)}")
    finally:
        page.browser.kill()
        page.browser.wait()
