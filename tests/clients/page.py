"""The web page in headless Chromium: a question is typed, its answer comes, hostile Markdown stays text, and axe-core finds nothing.

    python page.py ADDRESS FOLDER AXE

ADDRESS is a server's, such as http://127.0.0.1:11435, with the bundled model. FOLDER is where pictures go: light.png, dark.png,
phone.png, tokens.png, models.png and others. AXE is axe.min.js of the npm package axe-core.
"""

import json
import pathlib
import sys
import tempfile
import time

from browser import Page

ADDRESS, FOLDER, AXE = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]).read_text()


class Judged(Page):
    """A page that axe-core looks at."""

    def picture(self, name):
        (FOLDER / name).write_bytes(self.shot())

    def judge(self, state):
        """No violation of WCAG's levels A and AA, as far as axe-core sees."""
        if not self.run("typeof axe === 'object'"):
            # Not by an element of the page, which its policy forbids.
            self.call("Runtime.evaluate", expression=AXE)
        found = self.run("axe.run({ runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice'] }).then((all) => all.violations.map((one) => "
                         "[one.id, one.help, ...one.nodes.map((node) => node.target.join(' ') + ': ' + node.failureSummary)]))")
        assert found == [], f"{state}: {json.dumps(found, indent=1)}"
        self.judged = getattr(self, "judged", 0) + 1


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


def theme(page, name):
    page.run(f"document.documentElement.dataset.theme = '{name}'")


def width_fits(page, width):
    assert page.run(f"document.documentElement.scrollWidth <= {width}")


with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    page = Judged(folder)
    try:
        page.call("Emulation.setDeviceMetricsOverride", width=1100, height=800, deviceScaleFactor=1, mobile=False)
        page.call("Page.navigate", url=ADDRESS)
        page.until("document.querySelectorAll('#model option').length > 0")
        theme(page, "light")
        page.judge("empty")
        page.picture("empty.png")
        page.type("Tell me a story about a lamp that cannot sleep")
        page.until("document.querySelector('.assistant small')?.textContent.includes('tokens')", 120)
        page.until("document.getElementById('send').textContent === 'Send'")
        answer = page.run("document.querySelector('.assistant .body').textContent")
        assert len(answer) > 20, answer
        told = page.run("document.querySelector('.assistant small').textContent")
        assert "prompt tokens cached" in told, told
        page.judge("an answer")
        page.picture("light.png")
        theme(page, "dark")
        page.judge("an answer, dark")
        page.picture("dark.png")

        # Tokens with their probabilities, by mouse and by keys; together they are the answer.
        page.run("[...document.querySelectorAll('.assistant .tools button')].find((one) => one.textContent === 'Tokens').click()")
        count = page.run("document.querySelectorAll('.tokens [role=option]').length")
        assert count > 10, count
        together = page.run("[...document.querySelectorAll('.tokens [role=option]')].map((one) => one.textContent.replaceAll('\u21b5', '')).join('')")
        plain = "".join(answer.split())
        assert "".join(together.split()) == plain, (together, answer)
        page.point(".tokens [role=option]:nth-child(8)")
        page.until("!document.querySelector('.about').hidden && document.querySelectorAll('.about tr').length === 5")
        likeliest = page.run("document.querySelector('.about').innerText")
        assert "log-probability" in likeliest and "%" in likeliest, likeliest
        page.judge("tokens")
        theme(page, "light")
        page.picture("tokens.png")
        page.run("document.querySelector('.tokens').focus()")
        page.press("End", number=35)
        page.press("ArrowLeft", number=37)
        page.until(f"document.querySelector('.tokens').getAttribute('aria-activedescendant').endsWith('-{count - 2}')")

        # Settings, models and keys: by their keys, and closed by Escape.
        page.press("s", "KeyS", 83, modifiers=1)
        page.until("!document.getElementById('settings').hidden && document.activeElement.id === 'system'")
        page.judge("settings")
        page.picture("settings.png")
        # Any number within bounds counts, and one that is not is shown as wrong and left out.
        page.run("{ const input = document.getElementById('set-temperature'); input.value = '0.72'; input.oninput(); }")
        assert page.run("JSON.parse(localStorage['delft.settings']).temperature") == 0.72
        page.run("{ const input = document.getElementById('set-temperature'); input.value = '9'; input.oninput(); }")
        assert page.run("document.getElementById('set-temperature').ariaInvalid") == "true"
        assert page.run("JSON.parse(localStorage['delft.settings']).temperature") is None
        page.judge("a wrong setting")
        page.run("document.getElementById('defaults').click()")
        page.press("s", "KeyS", 83, modifiers=1)
        page.press("m", "KeyM", 77, modifiers=1)
        page.until("document.getElementById('models').open && document.querySelectorAll('#stock li').length > 0")
        page.until("!!document.querySelector('#stock .state.loaded')")
        assert "held" in page.run("document.getElementById('memory').textContent")
        page.judge("models")
        page.picture("models.png")
        # A download that the server refuses says why.
        page.run("document.getElementById('wanted').value = '/etc/passwd'; document.getElementById('pull').requestSubmit()")
        page.until("!!document.querySelector('#coming .error')")
        page.judge("a refused download")
        page.press("Escape", number=27)
        page.until("!document.getElementById('models').open")
        page.run("document.activeElement.blur()")
        page.press("?", "Slash", 191, modifiers=8, text="?")
        page.until("document.getElementById('keys').open")
        page.judge("keys")
        page.press("Escape", number=27)
        page.press("/", "Slash", 191, text="/")
        page.until("document.activeElement.id === 'text' && document.getElementById('text').value === ''")

        # Every control is reached by Tab, and shows it.
        reached = set()
        for _ in range(60):
            page.press("Tab", number=9)
            reached.add(page.run("document.activeElement.id || document.activeElement.textContent"))
            assert page.run("document.activeElement === document.body || getComputedStyle(document.activeElement).outlineStyle !== 'none'"), reached
        wanted = {"new", "model", "shelf", "theme", "help", "tune", "talk", "text", "send", "Copy", "Again", "Tokens", "Edit"}
        assert wanted <= reached, wanted - reached

        # A button says whether it could copy.
        page.run("[...document.querySelectorAll('.assistant .tools button')].find((one) => one.textContent === 'Copy').click()")
        page.until("['Copied', 'The browser forbids it'].includes(document.getElementById('live').textContent)")

        # What another window keeps meanwhile is kept.
        page.run("{ const all = JSON.parse(localStorage['delft.conversations']); all.push({ id: 'other', messages: [{ role: 'user', content: 'from elsewhere' }] });"
                 " localStorage['delft.conversations'] = JSON.stringify(all); dispatchEvent(new StorageEvent('storage', { key: 'delft.conversations' })); }")
        page.until("document.getElementById('list').textContent.includes('from elsewhere')")

        # Stopped in the middle, by Escape where no dialog takes it, kept by the browser.
        page.type("another one")
        page.until("document.querySelectorAll('.assistant').length === 2 && document.querySelectorAll('.assistant .body')[1].textContent.length > 30")
        page.run("document.getElementById('help').click()")
        page.press("Escape", number=27)
        page.until("!document.getElementById('keys').open")
        stopped = "document.querySelectorAll('.assistant .body')[1].textContent.length"
        before = page.run(stopped)
        page.until(f"{stopped} > {before} || document.getElementById('send').textContent === 'Send'")
        page.press("Escape", number=27)
        page.until("document.getElementById('send').textContent === 'Send'")
        page.call("Page.reload")
        page.until("document.querySelectorAll('.assistant').length === 2")
        assert "from elsewhere" in page.run("document.getElementById('list').textContent")

        # A phone: the list slides in, nothing is wider than the screen.
        page.call("Emulation.setDeviceMetricsOverride", width=375, height=700, deviceScaleFactor=2, mobile=True)
        page.until("document.querySelectorAll('#model option').length > 0")
        width_fits(page, 375)
        page.judge("a phone")
        page.picture("phone.png")
        page.run("document.getElementById('menu').click()")
        page.until("getComputedStyle(document.getElementById('sidebar')).visibility === 'visible'")
        time.sleep(0.3)
        page.judge("a phone's list")
        page.press("Escape", number=27)
        page.run("document.getElementById('shelf').click()")
        page.until("document.querySelectorAll('#stock li').length > 0")
        width_fits(page, 375)
        page.picture("phone-models.png")
        page.press("Escape", number=27)

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
        print(f"page: {told}; {len(page.requests)} requests, all to the server; axe-core found nothing in {page.judged} states; pictures in {FOLDER}")
    finally:
        page.browser.kill()
        page.browser.wait()
