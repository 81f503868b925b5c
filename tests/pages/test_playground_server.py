"""The page and its server: keys, restarts, loading, a proxy's path prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Route, expect

from runtime.messages import Progress
from tests.support.pages.tab import Tab
from tests.support.server.fake_engine import FakeServer, fake_server, ready
from tests.support.server.server_process import Server, free_port, start_server, stop_server

pytestmark = pytest.mark.pages
CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris."
KEY = "a-key-of-this-server"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_server(tmp_path, api_keys=(KEY,)) as server:
        yield server


def test_the_page_loads_without_a_key_and_asks_for_one(
    locked: FakeServer, open_tab: Callable[..., Tab]
):
    tab = open_tab(locked.url)
    tab.page.goto(locked.url)
    dialog = tab.page.get_by_role("dialog", name="API key")
    expect(dialog).to_be_visible()
    field = dialog.get_by_label("Key", exact=True)
    expect(field).to_be_focused()
    assert dialog.locator(".error").inner_text() == ""
    field.fill("wrong")
    field.press("Enter")
    expect(dialog.locator(".error")).to_contain_text("Incorrect API key")
    field.fill(KEY)
    field.press("Enter")
    expect(dialog).to_be_hidden()
    expect(tab.page.locator("#model")).to_have_text("fake")
    assert tab.ask("Hi")
    tab.page.reload()
    expect(tab.page.locator("#model")).to_have_text("fake")
    expect(dialog).to_be_hidden()
    other = tab.page.context.new_page()
    other.goto(locked.url)
    expect(other.get_by_role("dialog", name="API key")).to_be_visible()


def test_a_key_that_is_to_be_remembered_is_there_in_the_next_tab(
    locked: FakeServer, open_tab: Callable[..., Tab]
):
    tab = open_tab(locked.url)
    tab.page.goto(locked.url)
    dialog = tab.page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Remember it in this browser").check()
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_role("button", name="Use this key").click()
    expect(tab.page.locator("#model")).to_have_text("fake")
    other = tab.page.context.new_page()
    other.goto(locked.url)
    expect(other.locator("#model")).to_have_text("fake")


def test_a_key_is_asked_for_again_when_the_server_no_longer_takes_it(
    locked: FakeServer, open_tab: Callable[..., Tab]
):
    tab = open_tab(locked.url)
    tab.page.goto(locked.url)
    dialog = tab.page.get_by_role("dialog", name="API key")
    dialog.get_by_role("button", name="Cancel").click()
    tab.send("Hi")
    expect(dialog).to_be_visible()
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_label("Key", exact=True).press("Enter")
    expect(tab.page.locator("#model")).to_have_text("fake")
    tab.button("Retry").click()
    assert "Hello" in tab.text()


def test_a_copied_command_never_has_the_key(locked: FakeServer, open_tab: Callable[..., Tab]):
    tab = open_tab(locked.url)
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.page.goto(locked.url)
    dialog = tab.page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key", exact=True).fill(KEY)
    dialog.get_by_label("Key", exact=True).press("Enter")
    tab.ask("Hi")
    for language in ("curl", "Python", "JavaScript"):
        menu = tab.page.locator("#thread .menu")
        menu.evaluate("menu => menu.open = true")
        tab.button(language).click()
        expect(tab.button("Copied")).to_be_visible()
        program = tab.page.evaluate("navigator.clipboard.readText()")
        assert KEY not in program and "WAVEFILL_API_KEY" in program
        expect(tab.button("Copied")).to_be_hidden()


def test_a_server_that_restarts_under_an_open_page(tmp_path: Path, open_tab: Callable[..., Tab]):
    port = free_port()
    first = start_server(tmp_path / "log1", port=port)
    try:
        tab = open_tab(f"http://127.0.0.1:{port}").open()
        assert tab.ask(CAPITAL) == PARIS
        tab.send("Count from 1 to 90.")
        expect(tab.answers.last.locator(".answer-text")).to_contain_text("3")
        first.process.kill()
        first.process.wait()
        expect(tab.answers.last.locator(".error")).to_contain_text(
            "connection to the server was lost"
        )
        assert "3" in tab.answers.last.locator(".answer-text").inner_text()
        expect(tab.page.locator("#status")).to_contain_text("does not answer")
    finally:
        stop_server(first)
    second = start_server(tmp_path / "log2", "--served-model-name", "renamed", port=port)
    try:
        expect(tab.page.locator("#status")).to_be_hidden()
        expect(tab.page.locator("#model")).to_have_text("renamed")
        expect(tab.page.locator("#model")).to_have_attribute("title", "renamed")
        assert tab.ask("What is the capital of Italy?").endswith("Rome.")
        expect(tab.answers.last.locator(".answer-name")).to_have_text("renamed")
    finally:
        stop_server(second)


def test_a_server_that_loads_says_so_and_the_page_goes_on_by_itself(
    fake: FakeServer, open_tab: Callable[..., Tab]
):
    fake.engine.ready = None
    fake.engine.progress = Progress("weights", 3, 8)
    tab = open_tab(fake.url)
    tab.page.goto(fake.url)
    expect(tab.page.locator("#status")).to_contain_text("loading weights 37 %")
    fake.engine.ready = ready(100_000)
    expect(tab.page.locator("#status")).to_be_hidden()
    assert tab.ask("Hi")


def test_an_engine_that_fails_in_an_answer_is_reported_and_what_came_stays(
    fake: FakeServer, open_tab: Callable[..., Tab]
):
    fake.say("one two three four five six seven eight nine")
    fake.engine.fail_after = 12
    tab = open_tab(fake.url).open()
    tab.send("Hi")
    expect(tab.answers.locator(".error")).to_contain_text("a seeded fault")
    assert tab.text().startswith("one")


def test_the_page_works_below_a_path_prefix(server: Server, open_tab: Callable[..., Tab]):
    tab = open_tab(server.url)

    def without_prefix(route: Route) -> None:
        """What a proxy does."""
        route.fulfill(response=route.fetch(url=route.request.url.replace("/some/prefix", "")))

    seen: list[str] = []
    tab.page.on("request", lambda request: seen.append(request.url))
    tab.page.route("**/some/prefix/**", without_prefix)
    tab.page.goto(f"{server.url}/some/prefix/")
    assert tab.ask(CAPITAL) == PARIS
    assert [url for url in seen if "/some/prefix/" not in url] == []


def test_the_page_keeps_to_its_own_host_and_is_small(server: Server, open_tab: Callable[..., Tab]):
    """Other hosts are a problem of every tab; here with a formula, which loads the library."""
    tab = open_tab(server.url)
    sizes: dict[str, int] = {}

    def weigh(response: Any) -> None:
        if "/v1/" not in response.url and response.url.startswith(server.url):
            sizes[response.url] = len(response.body()) if response.ok else 0

    tab.page.on("requestfinished", lambda request: weigh(request.response()))
    tab.open()
    tab.ask('Repeat after me: "$x$"')
    tab.page.evaluate("import('/pages/playground/text/maths.js').then(m => m.formula('x', false))")
    tab.page.wait_for_timeout(500)
    assert any("temml" in url for url in sizes)
    assert sum(sizes.values()) < 400_000, sizes
