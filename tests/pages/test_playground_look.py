"""Markdown, long conversations, small and dark screens, keyboard and screen readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.support.pages.tab import Tab
from tests.support.server.fake_engine import FakeServer, ready
from tests.support.server.server_process import Server

pytestmark = pytest.mark.pages
RICH = """# Title

Some **bold**, *slanted*, ~~struck~~ and `code`, 5 &lt; 6 &amp; $5 to $6, a
[link](https://example.org).

| left | right |
|:-----|------:|
| 1    | 2     |

1. first
2. second
   - nested

- [x] done

> quoted

```python
print("<b>hello</b>")
```

Inline $e^{i\\pi} = -1$ and \\(a_1\\), and below

$$\\int_0^1 x^2\\,dx = \\frac{1}{3}$$

\\[ \\sum_{k=1}^n k = \\frac{n(n+1)}{2} \\]

---
The end.
"""
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.mark.parametrize("step", [1, 10_000])
def test_markdown_and_maths_become_elements(
    fake: FakeServer, open_tab: Callable[..., Tab], step: int
):
    """The same ones, whether the text comes token by token or at once."""
    fake.say(RICH)
    fake.engine.step = step
    tab = open_tab(fake.url).open()
    tab.ask("Hi")
    text = tab.answers.locator(".answer-text")
    for selector, content in {
        "h3": "Title", "strong": "bold", "em": "slanted", "del": "struck", "p > code": "code",
        "a": "link", "blockquote": "quoted", "pre": 'print("<b>hello</b>")', "hr + p": "The end.",
        "ol > li:first-child": "first", "ol ul > li": "nested", "td.to-right": "2",
    }.items():  # fmt: skip
        expect(text.locator(selector)).to_have_text(content)
    expect(text.locator("math")).to_have_count(4)
    expect(text.locator("math[display=block]")).to_have_count(2)
    expect(text.locator(".code-head span")).to_have_text("python")
    assert "5 < 6 & $5 to $6" in text.inner_text()
    expect(text.locator("input[type=checkbox]:checked")).to_have_count(1)


def test_code_is_copied_as_it_was_written(fake: FakeServer, open_tab: Callable[..., Tab]):
    fake.say("```py\nif a < b:\n    print('x')\n```")
    tab = open_tab(fake.url).open()
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.ask("Hi")
    tab.page.get_by_role("button", name="Copy the code").click()
    expect(tab.page.get_by_role("button", name="Copy the code")).to_have_text("Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print('x')"


def test_a_hundred_long_messages(fake: FakeServer, open_tab: Callable[..., Tab], tmp_path: Path):
    """They are shown, the last one is in sight, and one more is answered."""
    nodes: dict[str, dict[str, object]] = {"root": {"children": ["0"]}}
    lane = {"model": "fake", "system": "", "values": {}}
    for number in range(100):
        text = f"Message {number}\n\n" + RICH * 8
        node: dict[str, object] = {"kind": "user", "text": text}
        if number % 2:
            entry = {"lane": 0, "settings": lane, "content": text, "state": "done"}
            node = {"kind": "answers", "entries": [entry]}
        nodes[str(number)] = node | {"children": [str(number + 1)] if number < 99 else []}
    conversation = {"title": "long", "lanes": [lane], "nodes": nodes}
    file = tmp_path / "long.json"
    file.write_text(
        json.dumps({"format": "wavefill-conversations", "conversations": [conversation]})
    )
    tab = open_tab(fake.url).open()
    tab.page.locator('input[type="file"]').set_input_files(file)
    expect(tab.turns).to_have_count(100)
    fake.say("And " + RICH)
    fake.engine.ready = ready(2_000_000)
    tab.ask("One more.")
    expect(tab.turns).to_have_count(102)
    expect(tab.answers.last.locator(".figures")).to_be_in_viewport()
    tab.turns.first.scroll_into_view_if_needed()
    expect(tab.turns.first).to_be_in_viewport()


def test_the_view_follows_an_answer_unless_the_reader_scrolls_up(
    fake: FakeServer, open_tab: Callable[..., Tab]
):
    fake.say("\n\n".join(f"line {number}" for number in range(120)))
    fake.engine.delay = 0.005
    tab = open_tab(fake.url).open()
    tab.send("Hi")
    scrolled = "document.getElementById('scroller').scrollTop"
    tab.until(f"{scrolled} > 200")
    tab.page.locator("#scroller").hover()
    tab.page.mouse.wheel(0, -3000)
    tab.page.wait_for_timeout(300)
    tab.settled()
    assert tab.page.evaluate(scrolled) < 200


def test_a_phone_shows_all_without_scrolling_sideways(server: Server, open_tab: Callable[..., Tab]):
    tab = open_tab(server.url, **PHONE).open()
    wide = "document.documentElement.scrollWidth > innerWidth"
    expect(tab.page.locator("#settings-panel")).to_be_hidden()
    tab.message.fill("What is the capital of France?")
    tab.page.get_by_role("button", name="Send", exact=True).tap()
    assert "Paris" in tab.text()
    assert not tab.page.evaluate(wide)
    for name in ("Settings", "Conversations"):
        tab.page.get_by_role("button", name=name, exact=True).tap()
        panel = tab.page.locator(f"#{name.lower()}-panel")
        expect(panel).to_be_visible()
        assert not tab.page.evaluate(wide)
        tab.page.keyboard.press("Escape")
        expect(panel).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(
    server: Server, open_tab: Callable[..., Tab], scheme: str
):
    tab = open_tab(server.url, color_scheme=scheme).open()
    tab.ask("Hello!")
    ratios = tab.page.evaluate(
        """() => {
            const light = (colour) => {
                const part = colour.match(/[\\d.]+/g).slice(0, 3).map((each) => {
                    const value = each / 255;
                    return value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
                });
                return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
            };
            const behind = (element) => {
                const colour = getComputedStyle(element).backgroundColor;
                const clear = colour === "rgba(0, 0, 0, 0)";
                return clear && element.parentElement ? behind(element.parentElement) : colour;
            };
            const found = {};
            const shown = [".user-text", ".answer-text", ".figures", ".help", ".primary", "#model",
                ".answer-name", ".turn .actions button", "label code"];
            for (const selector of shown) {
                const element = document.querySelector(selector);
                const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
                found[selector] = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            }
            return found;
        }"""
    )
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def test_everything_that_can_be_used_has_a_name(tab: Tab):
    tab.set("top_logprobs", "2")
    tab.ask("Hello!")
    tab.unfold()
    nameless = tab.page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, summary, a")]
            .filter((each) => each.type !== "file" && !(
                each.getAttribute("aria-label") || each.labels?.length || each.innerText?.trim() ||
                each.textContent.trim()))
            .map((each) => each.outerHTML)"""
    )
    assert nameless == []


def test_a_conversation_goes_by_keyboard_alone(tab: Tab):
    expect(tab.message).to_be_focused()
    tab.page.keyboard.type("Hello!")
    tab.page.keyboard.press("Enter")
    tab.settled()
    expect(tab.message).to_be_focused()
    tab.page.keyboard.press("Shift+Tab")
    seen: list[str] = []
    for _ in range(6):  # the button for images, and those of the turn
        seen.append(tab.page.evaluate("document.activeElement.innerText"))
        tab.page.keyboard.press("Shift+Tab")
    assert {"Branch", "Retry", "Copy as", "Edit", "Copy"} <= set(seen), seen


def test_a_screen_reader_hears_the_end_and_not_each_token(tab: Tab):
    tab.page.evaluate(
        """() => {
            window.heard = [];
            new MutationObserver(() => heard.push(document.getElementById("live").textContent))
                .observe(document.getElementById("live"), { childList: true, characterData: true });
        }"""
    )
    tab.ask("Count from 1 to 20.")
    heard = tab.page.evaluate("window.heard")
    assert len(heard) == 2 and "being written" in heard[0] and "complete" in heard[1]
    assert tab.page.locator("#thread").get_attribute("aria-live") == "off"


def test_nothing_moves_for_who_wants_no_motion(fake: FakeServer, open_tab: Callable[..., Tab]):
    fake.engine.held = True
    tab = open_tab(fake.url, reduced_motion="reduce").open()
    tab.send("Hi")
    expect(tab.page.locator(".waiting")).to_be_visible()
    assert tab.page.evaluate("document.getAnimations().length") == 0
    fake.engine.held = False
    tab.settled()
