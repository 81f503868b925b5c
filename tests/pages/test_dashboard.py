"""The dashboard in a browser: what it shows under load, keys, restarts, small and dark screens."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from msgspec.structs import replace
from playwright.sync_api import Page, expect

from runtime.messages import Progress
from runtime.snapshot import PageMap, SequenceState, Snapshot
from runtime.stats import Stats
from tests.support.pages.tab import Tab
from tests.support.server.fake_engine import fake_server, ready
from tests.support.server.server_process import Server, free_port, start_server, stop_server

pytestmark = pytest.mark.pages
KEY = "a-key-of-this-server"
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


# What is wider than the card that it is in.
OUTSIDE = """[...document.querySelectorAll(".card *")].filter((each) => {
  const right = each.closest(".card").getBoundingClientRect().right;
  return !each.closest("#requests thead") && each.getBoundingClientRect().right > right;
}).map((each) => each.outerHTML)"""


@contextmanager
def load(url: str, *, threads: int = 4, max_tokens: int = 300, **headers: str) -> Iterator[None]:
    """Requests with a common prefix, one after the other from each thread, until the block ends."""
    ended = threading.Event()

    def ask(number: int) -> None:
        words = "the quick brown fox jumps over the lazy dog " * 20
        body = {
            "model": "tiny-chat", "prompt": f"{words} {number}", "max_tokens": max_tokens,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        while not ended.is_set():
            url_of = f"{url}/v1/completions"
            with httpx.stream("POST", url_of, json=body, headers=headers, timeout=60) as answer:
                for _ in answer.iter_raw():
                    if ended.is_set():
                        break

    asking = [threading.Thread(target=ask, args=(number,)) for number in range(threads)]
    for thread in asking:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in asking:
            thread.join(30)


def opened(open_tab: Callable[..., Tab], url: str, **options: Any) -> Page:
    page = open_tab(url, **options).page
    page.goto(f"{url}/dashboard")
    return page


def live(page: Page) -> None:
    expect(page.locator("#status")).to_have_text("Live")
    expect(page.locator("body")).to_have_class(re.compile("shown"))


def test_under_load_every_figure_is_there(server: Server, open_tab: Callable[..., Tab]):
    with load(server.url):
        page = opened(open_tab, server.url)
        live(page)
        expect(page.locator("#tile-running .value")).to_have_text("4")
        expect(page.locator("#tile-inter .value")).to_contain_text("s")
        expect(page.locator("#tile-hits .value")).to_contain_text("%")
        expect(page.locator("#tile-generated .value")).to_have_text(re.compile("^[1-9]"))
        expect(page.locator("#waves h3")).to_have_text(
            ["This plan (stream-k)", "FlashAttention-3's rule"]
        )
        expect(page.locator("#waves-lead")).to_contain_text("NVIDIA H100")
        expect(page.locator("#pages-lead")).to_contain_text("16 tokens")
        expect(page.locator("#steps-lead")).to_contain_text("predicted")
        expect(page.locator("#memory-lead")).to_contain_text("cpu")
        expect(page.locator("#keys tbody th")).to_have_text(["all"])
        rows = page.locator("#requests tbody tr")
        expect(rows.first).to_be_visible()
        expect(rows.first.locator(".line .decode")).not_to_have_count(0)
        drawn = page.evaluate(
            """() => [...document.querySelectorAll("canvas[role=img]")].map((canvas) => {
                const { width, height } = canvas;
                const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
                return data.some((value) => value > 0);
            })"""
        )
        assert drawn == [True] * 4


def test_the_map_of_pages_counts_every_page(server: Server, open_tab: Callable[..., Tab]):
    total = httpx.get(f"{server.url}/server_info").json()["engine"]["num_pages"]
    with load(server.url):
        page = opened(open_tab, server.url)
        live(page)
        expect(page.locator("#tile-running .value")).to_have_text("4")
        counts = page.locator("#pages .legend b").all_inner_texts()
    numbers = [int(count.replace(",", "")) for count in counts]
    assert sum(numbers) == total
    assert numbers[2] > 0 and numbers[3] > 0  # the common prefix, and what follows it


def two_groups() -> Snapshot:
    """Of a model with windows: 300 pages with content of one group, 24 of the other, 700 free."""
    running = SequenceState(7, "decode", 4000, 0, 4100, 4101, 324, 0, [])
    return Snapshot(
        1.0, Stats(running=1, pages_used=300, pages_total=1024), [running], [],
        PageMap(1, [3, 280, 1, 44, 0, 700], 700, 44, 0, 280), [], (), None, [], 0.0,
        [PageMap(1, [3, 260, 1, 40], 0, 40, 0, 260), PageMap(1, [3, 20, 1, 4], 0, 4, 0, 20)],
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, PHONE, {"color_scheme": "dark"}])
def test_each_group_of_layers_has_a_map_of_its_pages(
    tmp_path: Path, open_tab: Callable[..., Tab], options: dict[str, Any]
):
    with fake_server(tmp_path) as fake:
        fake.engine.ready = replace(ready(), group_windows=(0, 1024), num_pages=1024)
        fake.engine.snapshot = two_groups()
        page = opened(open_tab, fake.url, **options)
        live(page)
        expect(page.locator("#pages h3")).to_have_text(
            [
                "Layers with full attention: 260 in use, 40 cached",
                "Layers with a window of 1,024: 20 in use, 4 cached",
            ]
        )
        expect(page.locator("#pages canvas")).to_have_count(2)
        label = page.locator("#pages canvas").last.get_attribute("aria-label")
        assert label is not None and label.endswith(": 4 cached, 0 shared, 20 of one sequence")
        expect(page.locator("#pages-lead")).to_contain_text("700 are free")
        across, inner = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert across <= inner
        # A square is as large in one map as in the other.
        heights = page.locator("#pages canvas").evaluate_all(
            "(all) => all.map((one) => one.clientHeight)"
        )
        assert heights[0] > heights[1] > 0
        page.close()


def test_a_request_that_is_chosen_has_its_phases_in_words(
    server: Server, open_tab: Callable[..., Tab]
):
    with load(server.url):
        page = opened(open_tab, server.url)
        live(page)
        running = page.locator("#requests tr.state-running .id").first
        running.focus()
        page.keyboard.press("Enter")
        expect(running).to_have_attribute("aria-pressed", "true")
        expect(page.locator("#requests td.time .note:not(:empty)")).to_contain_text("waited")
        expect(page.locator("#requests td.time .note:not(:empty)")).to_contain_text("chunk")
        page.keyboard.press("Enter")
        expect(running).to_have_attribute("aria-pressed", "false")


def test_pause_stops_the_page_and_the_sampling(server: Server, open_tab: Callable[..., Tab]):
    page = opened(open_tab, server.url)
    live(page)
    seen: list[str] = []
    page.on("request", lambda request: seen.append(request.url))
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#status")).to_have_text("Paused")
    page.wait_for_timeout(1500)
    assert seen == []
    page.get_by_role("button", name="Go on").click()
    live(page)


def test_the_page_asks_for_a_key_and_takes_the_right_one(
    tmp_path: Path, open_tab: Callable[..., Tab]
):
    with fake_server(tmp_path, api_keys=(KEY,)) as locked:
        page = opened(open_tab, locked.url)
        dialog = page.get_by_role("dialog", name="API key")
        field = dialog.get_by_label("Key", exact=True)
        expect(field).to_be_focused()
        assert dialog.locator(".error").inner_text() == ""
        field.fill("wrong")
        field.press("Enter")
        expect(dialog.locator(".error")).to_contain_text("Incorrect API key")
        field.fill(KEY)
        field.press("Enter")
        expect(dialog).to_be_hidden()
        expect(page.locator("#status")).to_have_text("Live")
        page.reload()
        expect(page.locator("#status")).to_have_text("Live")
        page.close()


def test_a_key_that_may_not_watch_gets_the_option_that_would_let_it(
    tmp_path: Path, open_tab: Callable[..., Tab]
):
    with fake_server(tmp_path, api_keys=("alice one", "bob two")) as locked:
        page = opened(open_tab, locked.url)
        dialog = page.get_by_role("dialog", name="API key")
        dialog.get_by_label("Key", exact=True).fill("one")
        dialog.get_by_label("Key", exact=True).press("Enter")
        expect(dialog.locator(".error")).to_contain_text("--dashboard-keys")


def test_a_server_that_restarts_under_an_open_page(tmp_path: Path, open_tab: Callable[..., Tab]):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    first = start_server(tmp_path / "log1", port=port)
    try:
        page = opened(open_tab, url)
        live(page)
    finally:
        stop_server(first)  # a drain does not wait for the page
    assert first.process.returncode == 0
    expect(page.locator("#status")).to_contain_text("does not answer")
    second = start_server(tmp_path / "log2", "--served-model-name", "renamed", port=port)
    try:
        live(page)
        expect(page.locator("#model")).to_contain_text("renamed")
        expect(page.locator("#model")).to_have_attribute("title", re.compile("renamed"))
    finally:
        stop_server(second)


def test_an_engine_that_loads_says_so(tmp_path: Path, open_tab: Callable[..., Tab]):
    with fake_server(tmp_path) as fake:
        fake.engine.ready = None
        fake.engine.progress = Progress("weights", 3, 8)
        page = opened(open_tab, fake.url)
        expect(page.locator("#status")).to_contain_text("Loading: weights 37.5")
        fake.engine.ready, fake.engine.progress = ready(), None
        expect(page.locator("#status")).to_have_text("Live")
        page.close()  # the server of a test waits for its streams


def test_a_phone_shows_all_without_scrolling_sideways(server: Server, open_tab: Callable[..., Tab]):
    with load(server.url):
        page = opened(open_tab, server.url, **PHONE)
        live(page)
        expect(page.locator("#requests tbody tr").first).to_be_visible()
        wide = "[document.documentElement.scrollWidth, innerWidth]"
        across, inner = page.evaluate(wide)
        assert across <= inner == 360


def test_the_name_of_a_key_is_as_long_as_it_likes(tmp_path: Path, open_tab: Callable[..., Tab]):
    name = "the-team-of-people-who-do-research-in-production-environment-west-4"
    (tmp_path / "keys").write_text(f"{name} {KEY}\n")
    server = start_server(tmp_path / "log", "--api-key-file", str(tmp_path / "keys"))
    try:
        with load(server.url, threads=1, authorization=f"Bearer {KEY}"):
            page = opened(open_tab, server.url)
            page.get_by_role("dialog").get_by_label("Key", exact=True).fill(KEY)
            page.get_by_role("dialog").get_by_label("Key", exact=True).press("Enter")
            live(page)
            for place in ("#keys tbody th", "#requests td.key"):
                expect(page.locator(place).first).to_have_text(name)
            for width in (320, 360, 700, 1024, 1250, 1400):
                page.set_viewport_size({"width": width, "height": 800})
                assert page.evaluate(OUTSIDE) == [], width
            page.close()
    finally:
        stop_server(server)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_background(
    server: Server, open_tab: Callable[..., Tab], scheme: str
):
    with load(server.url, threads=1):
        page = opened(open_tab, server.url, color_scheme=scheme)
        live(page)
        expect(page.locator("#requests tbody tr").first).to_be_visible()
        shown = ["#model", "#status", ".tile h3", ".value", ".note", ".lead", ".legend li",
                 "#waves .help", "thead th", "#requests td.state", ".id", ".id code", "#cost",
                 "header a"]  # fmt: skip
        ratios = contrasts(page, shown)
    assert {name: ratio for name, ratio in ratios.items() if ratio < 4.5} == {}


def contrasts(page: Page, selectors: list[str]) -> dict[str, float]:
    """The contrast of the text of each element with what is behind it."""
    return page.evaluate(
        """(selectors) => {
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
            const ratio = (element) => {
                const [a, b] = [light(getComputedStyle(element).color), light(behind(element))];
                return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
            };
            return Object.fromEntries(
                selectors.map((each) => [each, ratio(document.querySelector(each))]));
        }""",
        selectors,
    )


def test_everything_has_a_name_and_nothing_moves(server: Server, open_tab: Callable[..., Tab]):
    with load(server.url, threads=1):
        page = opened(open_tab, server.url, reduced_motion="reduce")
        live(page)
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, input, a, [role=img], section")]
                .filter((each) => !(each.getAttribute("aria-label") || each.labels?.length ||
                    each.getAttribute("aria-labelledby") || each.textContent.trim()))
                .map((each) => each.outerHTML)"""
        )
        assert nameless == []
        assert page.evaluate("document.getAnimations().length") == 0


def test_the_page_works_below_a_path_prefix(tmp_path: Path, open_tab: Callable[..., Tab]):
    with fake_server(tmp_path, root_path="/llm") as fake:
        page = open_tab(fake.url).page
        page.goto(f"{fake.url}/llm/dashboard")
        expect(page.locator("#status")).to_have_text("Live")
        page.close()


def test_a_timeline_has_chunks_preemptions_and_what_lies_between(
    server: Server, open_tab: Callable[..., Tab]
):
    page = opened(open_tab, server.url)
    request = {
        "arrived": 100.0, "started": 101.0, "first_token": 103.0, "ended": 110.0,
        "events": [[101.0, 512], [102.0, 100], [105.0, 0], [106.0, 700]],
    }  # fmt: skip
    phases = page.evaluate(
        """async (request) => {
            const { phasesOf, describe } = await import("/pages/dashboard/view/timeline.js");
            const phases = phasesOf(request, undefined, 110);
            const text = describe(phases);
            return [phases.map(({ kind, from, to }) => [kind, from, to]), text];
        }""",
        request,
    )
    assert phases[0] == [
        ["queue", 0, 1], ["chunk", 1, 2], ["chunk", 2, 3], ["decode", 3, 5],
        ["preempted", 5, 6], ["chunk", 6, 6], ["decode", 6, 10],
    ]  # fmt: skip
    assert "in 3 chunks of 512, 100, 700 tokens" in phases[1]
    waiting = page.evaluate(
        """async () => (await import("/pages/dashboard/view/timeline.js"))
            .phasesOf({ arrived: 100, started: 0, ended: 0, events: [] }, undefined, 104)
        """
    )
    assert [(each["kind"], each["to"]) for each in waiting] == [("queue", 4)]
