"""Whatever a model, a user or a file says: nothing of it runs, and nothing is fetched for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.pages.tab import EXECUTED, Tab
from tests.support.server.fake_engine import FakeServer

pytestmark = pytest.mark.pages
HOSTILE = [
    f"<script>{EXECUTED}</script>",
    f'<img src=x onerror="{EXECUTED}">',
    f'<svg onload="{EXECUTED}"><g/onload={EXECUTED}></svg>',
    f'<iframe srcdoc="<script>parent.{EXECUTED}</script>"></iframe>',
    f'<details open ontoggle="{EXECUTED}">x</details>',
    "<style>*{background:url(http://127.0.0.9/style)}</style><link rel=stylesheet href=http://127.0.0.9/l>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.9/'><base href=http://127.0.0.9/>",
    f"[click](javascript:{EXECUTED.replace(' ', '%20')})",
    "[click](JaVaScRiPt:alert(1)) [a](data:text/html,<script>1</script>) [b](vbscript:x)",
    "[c](\x01javascript:alert(1)) [d](java\nscript:alert(1)) [e](&#106;avascript:alert(1))",
    "![picture](http://127.0.0.9/picture.png) ![p](data:image/svg+xml,<svg onload=alert(1)>)",
    "[reference][r]\n\n[r]: javascript:alert(1)",
    "<http://127.0.0.9/auto> <javascript:alert(1)>",
    f'[title](http://127.0.0.9/ "x\\" onmouseover=\\"{EXECUTED}")',
    f'```html"><script>{EXECUTED}</script>\n</code></pre><script>{EXECUTED}</script>\n```',
    f"$\\href{{javascript:{EXECUTED}}}{{x}}$ and $\\includegraphics{{http://127.0.0.9/p}}$",
    "$\\style{background:url(http://127.0.0.9/s)}{x}$ $\\class{a}{x}$ $\\id{thread}{x}$",
    f"$$\\text{{<img src=x onerror={EXECUTED}>}}$$",
    "$\\def\\a{\\a\\a}\\a$ and $" + "{" * 3000 + "$",
    f"| a |\n|---|\n| <img src=x onerror={EXECUTED}> |",
    f'- [ ] <input autofocus onfocus="{EXECUTED}">',
    "[" * 2000 + "](" * 500,
    "*" * 3000 + "_" * 3000 + "`" * 3001,
    "> " * 300 + "deep",
    "\u202egnp.exe\u0000\ud7ff&#0;&#x110000;&#xd800;",
]
SCHEMES = "anchors => anchors.map(a => new URL(a.href).protocol)"


def check(tab: Tab) -> None:
    """Nothing ran, no element of the markup was made, and links lead to the web only."""
    tab.page.wait_for_timeout(100)
    assert tab.ran() is None
    made = "script, img, iframe, svg, style, link, base, meta, object, embed, form, [style*=url]"
    assert tab.page.locator("#thread").locator(made).count() == 0
    links = tab.page.locator("#thread a")
    assert set(links.evaluate_all(SCHEMES)) <= {"http:", "https:", "mailto:"}
    assert all("noopener" in rel for rel in links.evaluate_all("all => all.map(a => a.rel)"))
    handlers = "all => all.filter(e => [...e.attributes].some(a => a.name.startsWith('on'))).length"
    assert tab.page.locator("#thread *").evaluate_all(handlers) == 0


def test_no_answer_runs_anything(fake: FakeServer, open_tab: Callable[..., Tab]):
    """Nor does the same text in a message, a title, or as a key or value of a table."""
    tab = open_tab(fake.url).open()
    fake.engine.step = 400
    for text in HOSTILE:
        fake.say(text)
        tab.ask(text)
        check(tab)
    shown = tab.page.locator(".answer-text").first.text_content()
    assert shown == HOSTILE[0], "markup is shown as it was written"
    fake.engine.step = 1
    fake.say("\n\n".join(HOSTILE[:12]))
    tab.ask("all of them, token by token")
    check(tab)


def test_links_open_elsewhere_and_pictures_are_links(
    fake: FakeServer, open_tab: Callable[..., Tab]
):
    fake.say("[a](https://example.org/a) ![b](https://example.org/b.png) [c](/v1/models)")
    tab = open_tab(fake.url).open()
    tab.ask("Hi")
    links = tab.answers.locator("a")
    assert links.all_inner_texts() == ["a", "[picture: b]"]
    assert links.evaluate_all("all => all.map(a => a.target)") == ["_blank", "_blank"]


def test_the_policy_stops_what_would_get_past_the_renderer(
    fake: FakeServer, open_tab: Callable[..., Tab]
):
    tab = open_tab(fake.url).open()
    blocked = tab.page.evaluate(
        """async () => {
            const found = [];
            const attempt = async (name, work) => {
                try { await work(); } catch { found.push(name); }
            };
            await attempt("html", () => { document.body.innerHTML += "<b>x</b>"; });
            await attempt("script", () => {
                document.createElement("script").textContent = "window.hostile = 1";
            });
            await attempt("url", () => { document.createElement("script").src = "/x.js"; });
            await attempt("fetch", () => fetch("http://127.0.0.9:1/"));
            const style = document.createElement("p");
            style.setAttribute("style", "color: red");
            if (style.style.color !== "red") found.push("style");
            return found;
        }"""
    )
    assert blocked == ["html", "script", "url", "fetch", "style"]
    assert tab.problems, "the browser reports what it stops"
    tab.problems.clear()


def test_calls_and_results_are_text_too(
    fake: FakeServer, open_tab: Callable[..., Tab], tmp_path: Path
):
    """By way of a file, which may hold anything at all."""
    text = "\n".join(HOSTILE[:6])
    lane = {"model": text, "system": text, "values": {"seed": text, "__proto__": text}}
    entry = {
        "lane": 0, "settings": lane, "content": text, "reasoning": text, "error": text,
        "calls": [{"id": "c", "name": text, "arguments": text}], "state": text, "finish": text,
        "logprobs": [[text, -0.5, [[text, -0.5], [text, "x"]]], 7, None], "tokens": text,
    }  # fmt: skip
    nodes = {
        "root": {"children": ["a", "a", "missing", "root"], "selected": "a"},
        "a": {"kind": "user", "text": text, "children": ["b"], "selected": "b"},
        "b": {"kind": "answers", "entries": [entry], "children": ["c", "a"], "selected": "c"},
        "c": {"kind": "results", "results": {"0": {"c": text}}, "children": ["d"]},
        "d": {"kind": "answers", "entries": "none", "children": []},
        "__proto__": {"kind": "user", "text": text, "children": ["__proto__"]},
    }
    conversation = {"id": "__proto__", "title": text, "lanes": [lane], "nodes": nodes}
    file = tmp_path / "hostile.json"
    file.write_text(
        json.dumps({"format": "wavefill-conversations", "conversations": [conversation]})
    )
    tab = open_tab(fake.url).open()
    tab.page.locator('input[type="file"]').set_input_files(file)
    expect(tab.turns).to_have_count(3)
    tab.page.locator(".reasoning summary").click()
    tab.button("Tokens").click()
    tab.page.locator(".token").first.hover()
    check(tab)
    assert tab.page.evaluate("({}).text ?? null") is None
    tab.set("seed", "")
    assert tab.ask("Hi")


@pytest.mark.parametrize("written", ["{", "[]", "null", '{"format": "wavefill-conversations"}'])
def test_a_broken_file_is_refused(
    fake: FakeServer, open_tab: Callable[..., Tab], tmp_path: Path, written: str
):
    file = tmp_path / "broken.json"
    file.write_text(written)
    tab = open_tab(fake.url).open()
    tab.page.locator('input[type="file"]').set_input_files(file)
    expect(tab.page.locator("#notice")).to_contain_text("was not imported")
