"""The playground in a headless browser, as its tests use it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from playwright.sync_api import BrowserContext, Locator, Page, expect

SECONDS = 30
EXECUTED = "window.hostile = (window.hostile ?? 0) + 1"  # what hostile texts try to run
# Answers 401 and 503, and a server that is gone, are written to the console by the browser itself.
BY_BROWSER = "Failed to load resource"


@dataclass
class Tab:
    """One page, and what went wrong in it."""

    page: Page
    url: str
    problems: list[str] = field(default_factory=list)

    @staticmethod
    def of(context: BrowserContext, url: str) -> Tab:
        context.set_default_timeout(SECONDS * 1000)
        expect.set_options(timeout=SECONDS * 1000)
        page = context.new_page()
        tab = Tab(page, url)
        page.on("pageerror", lambda error: tab.problems.append(str(error)))
        page.on("console", lambda message: tab._console(message.type, message.text))
        page.on("request", lambda request: tab._requested(request.url))
        return tab

    def _console(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and not text.startswith(BY_BROWSER):
            self.problems.append(text)

    def _requested(self, url: str) -> None:
        if not url.startswith((self.url, "blob:", "data:")):
            self.problems.append(f"a request to {url}")

    def open(self) -> Tab:
        self.page.goto(f"{self.url}/")
        expect(self.page.get_by_label("Model", exact=True)).to_be_attached()
        return self

    @property
    def message(self) -> Locator:
        return self.page.get_by_label("Message", exact=True)

    @property
    def answers(self) -> Locator:
        """Each answer, of all columns."""
        return self.page.locator(".answer")

    @property
    def turns(self) -> Locator:
        return self.page.locator("#thread > .turn")

    def text(self, index: int = -1) -> str:
        """Of an answer, the last one by default, once it is complete; "" if it has none."""
        self.settled()
        shown = self.answers.nth(index).locator(".answer-text")
        return shown.inner_text() if shown.count() else ""

    def settled(self) -> None:
        expect(self.page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        expect(self.page.locator('.answer[aria-busy="true"]')).to_have_count(0)

    def ask(self, text: str) -> str:
        """Send a message; the text of its answer."""
        self.send(text)
        return self.text()

    def send(self, text: str) -> None:
        self.message.fill(text)
        self.message.press("Control+Enter")

    def button(self, name: str) -> Locator:
        """The last one of this name in the conversation."""
        return self.page.locator("#thread").get_by_role("button", name=name, exact=True).last

    def set(self, name: str, value: str) -> None:
        """A parameter, by its name in the API."""
        self.unfold()
        field = self.page.locator(f'#settings [name="{name}"]')
        if field.evaluate("field => field.localName") == "select":
            field.select_option(value)
        else:
            field.fill(value)

    def until(self, expression: str) -> None:
        """Wait for it in the page; page.wait_for_function would need eval."""
        deadline = time.monotonic() + SECONDS
        while not self.page.evaluate(expression):
            assert time.monotonic() < deadline, expression
            self.page.wait_for_timeout(20)

    def unfold(self) -> None:
        """Open all groups of parameters."""
        closed = self.page.locator("#settings details:not([open]) > summary")
        while closed.count():
            closed.first.click()

    def ran(self) -> object:
        """What hostile text has left behind; None if none was run."""
        return self.page.evaluate("window.hostile ?? null")
