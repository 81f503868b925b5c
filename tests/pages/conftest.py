"""The pages in a real browser: `make test-pages`."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.server.fake_engine import FakeServer, fake_server
from tests.support.server.server_process import Server, start_server, stop_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.support.pages.tab import Tab

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def asked_for(config: pytest.Config) -> bool:
    return any("tests/pages" in str(argument) for argument in config.invocation_params.args)


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Only when asked for by name: a browser is not always there."""
    return None if asked_for(config) else True


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The system's Chromium, or else the one that Playwright has installed."""
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    with sync_playwright() as playwright:
        # Root, as in a container, has no sandbox.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model under two names."""
    log = tmp_path_factory.mktemp("pages") / "log"
    server = start_server(log, "tiny-chat", "--served-model-name", "tiny-chat,other-name")
    yield server
    stop_server(server)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeServer]:
    """A server whose answers the test writes."""
    with fake_server(tmp_path, context=100_000) as server:
        yield server


@pytest.fixture
def open_tab(browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Opens the playground of a server in a browser that knows nothing; it must have no errors."""
    from tests.support.pages.tab import Tab

    opened: list[Tab] = []

    def open_tab(url: str, **options: Any) -> Tab:
        tab = Tab.of(
            browser.new_context(**{"viewport": {"width": 1400, "height": 900}} | options), url
        )
        opened.append(tab)
        return tab

    yield open_tab
    for tab in opened:
        tab.page.context.close()
    assert [problem for tab in opened for problem in tab.problems] == []


@pytest.fixture
def tab(open_tab: Callable[..., Tab], server: Server) -> Tab:
    return open_tab(server.url).open()
