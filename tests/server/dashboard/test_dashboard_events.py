"""GET /dashboard/events: who gets it, what it says, and that it costs nothing without a page."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from runtime.messages import Progress
from runtime.snapshot import PageMap, SequenceState, Snapshot
from runtime.stats import Stats
from server.dashboard.share import KeyRow, RequestRow, Share, merged
from tests.support.server.fake_engine import FakeEngine, FakeServer, fake_server

ALICE, BOB = "sk-alice", "sk-bob"


def snapshot(**changes: Any) -> Snapshot:
    sequence = SequenceState(1, "decode", 5, 0, 7, 8, 1, 0, [(1.0, 5)])
    fields: dict[str, Any] = {
        "at": 2.0, "stats": Stats(running=1, steps=3), "sequences": [sequence], "waiting": [],
        "pages": PageMap(1, [3, 1, 0, 63], 63, 0, 0, 1), "steps": [], "weights": (), "wave": None,
        "shares": [], "build_seconds": 0.001,
    }  # fmt: skip
    return Snapshot(**fields | changes)


@contextmanager
def events(url: str, key: str = "", engine: int = 0) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of a page, as long as the block lasts."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url}/dashboard/events" + (f"?engine={engine}" if engine else "")
    with httpx.stream("GET", address, headers=headers, timeout=20) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        yield (json.loads(line[6:]) for line in lines)


def get(server: FakeServer, path: str, key: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers={"authorization": f"Bearer {key}"})


def wait_until_quiet(fake: FakeServer) -> int:
    """How often the engine was asked, once it is asked no more."""
    for _ in range(10):
        before = fake.engine.observed
        time.sleep(1.3)
        if fake.engine.observed == before:
            return before
    raise AssertionError("the engine is asked without a page")


def test_a_page_gets_what_the_engine_says_once_a_second(fake: FakeServer):
    fake.engine.snapshot = snapshot()
    with events(fake.url) as page:
        found = [next(page) for _ in range(4)]
    with_engine = [each for each in found if each["engine"]]
    assert len(with_engine) >= 2
    event = with_engine[-1]
    assert event["engine"]["sequences"][0]["state"] == "decode"
    assert event["engine"]["pages"]["runs"] == [3, 1, 0, 63]
    assert (event["server"]["state"], event["server"]["num_pages"]) == ("ready", 64)


def test_nothing_is_sampled_without_a_page(fake: FakeServer):
    fake.engine.snapshot = snapshot()
    before = wait_until_quiet(fake)
    with events(fake.url) as page:
        next(page)
        next(page)
        assert fake.engine.observed > before
    wait_until_quiet(fake)


def test_two_pages_share_one_sampler(fake: FakeServer):
    fake.engine.snapshot = snapshot()
    before = wait_until_quiet(fake)
    with events(fake.url) as one, events(fake.url) as two:
        for _ in range(4):
            next(one)
            next(two)
        asked = fake.engine.observed - before
    # One sampler for each would have asked twice as often as there were events.
    assert asked <= 5


def test_an_engine_that_loads_is_reported_without_figures(fake: FakeServer):
    fake.engine.ready = None
    with events(fake.url) as page:
        event = next(page)
    assert (event["engine"], event["server"]["state"]) == (None, "loading")


def test_requests_are_listed_with_their_times_and_counted_by_key(tmp_path: Path):
    keys = (f"alice {ALICE}", f"bob {BOB}")
    with fake_server(tmp_path, api_keys=keys, dashboard_keys=("alice",)) as server:
        server.say("Hello, world!")
        body = {"model": "fake", "prompt": "The fox", "max_tokens": 4}
        for key, count in ((ALICE, 1), (BOB, 2)):
            for _ in range(count):
                headers = {"authorization": f"Bearer {key}"}
                httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        server.engine.held = True
        held = threading.Thread(
            target=httpx.post,
            args=(f"{server.url}/v1/completions",),
            kwargs={"json": body, "headers": {"authorization": f"Bearer {BOB}"}},
        )
        held.start()
        server.engine.snapshot = snapshot()
        with events(server.url, ALICE) as page:
            event = next(each for each in page if each["open"])
            server.engine.held = False
        held.join(10)
    assert event["open"] == 1
    assert [row["key"] for row in event["requests"]] == ["bob", "bob", "bob", "alice"]
    assert [row["state"] for row in event["requests"]] == ["queued", *["finished"] * 3]
    done = event["requests"][1]
    assert done["arrived"] <= done["started"] <= done["first_token"] <= done["ended"]
    assert (done["prompt_tokens"], done["completion_tokens"], done["route"]) == (
        2,
        4,
        "completions",
    )
    alice, bob = event["keys"]["alice"], event["keys"]["bob"]
    assert (alice["requests"], alice["generated"], alice["waiting"]) == (1, 4, 0)
    assert (bob["requests"], bob["generated"], bob["waiting"]) == (2, 8, 1)


def test_neither_texts_nor_keys_are_in_an_event(tmp_path: Path):
    with fake_server(tmp_path, api_keys=(ALICE,)) as server:
        server.say("The quick brown fox")
        headers = {"authorization": f"Bearer {ALICE}"}
        body = {"model": "fake", "prompt": "over the lazy dog", "max_tokens": 4}
        httpx.post(f"{server.url}/v1/completions", json=body, headers=headers)
        server.engine.snapshot = snapshot()
        with events(server.url, ALICE) as page:
            text = json.dumps([next(page), next(page)])
    for secret in (ALICE, "fox", "lazy"):
        assert secret not in text


def test_the_only_key_may_watch_and_a_wrong_one_may_not(tmp_path: Path):
    with fake_server(tmp_path, api_keys=(ALICE,)) as server:
        assert httpx.get(f"{server.url}/dashboard").status_code == 200
        assert httpx.get(f"{server.url}/dashboard/events").status_code == 401
        assert get(server, "/dashboard/events", "wrong").status_code == 401
        with events(server.url, ALICE) as page:
            assert next(page)["server"]["keys"]


@pytest.mark.parametrize("chosen", [(), ("alice",)])
def test_of_several_keys_only_those_that_are_named_may_watch(
    tmp_path: Path, chosen: tuple[str, ...]
):
    keys = (f"alice {ALICE}", f"bob {BOB}")
    with fake_server(tmp_path, api_keys=keys, dashboard_keys=chosen) as server:
        refused = get(server, "/dashboard/events", BOB)
        assert refused.status_code == 403
        error = refused.json()["error"]
        assert error["code"] == "dashboard_not_allowed" and "--dashboard-keys" in error["message"]
        if chosen:
            with events(server.url, ALICE) as page:
                assert next(page)
        else:
            assert get(server, "/dashboard/events", ALICE).status_code == 403


def test_head_ends_at_once_and_a_query_is_refused(fake: FakeServer):
    assert httpx.head(f"{fake.url}/dashboard/events").status_code == 200
    assert httpx.get(f"{fake.url}/dashboard/events?every=2").status_code == 400


def test_a_page_shows_one_engine_of_several_and_the_load_of_all(fake: FakeServer):
    fake.engine.snapshot = snapshot()
    loading = FakeEngine(reply=lambda request: [], ready=None, index=1)
    loading.progress = Progress("weights", 1, 4)
    fake.engine.others = [loading]
    fake.engine.stats = Stats(running=3, pages_used=16, pages_total=64)
    with events(fake.url) as page:
        event = next(event for event in page if event["engine"])
    server = event["server"]
    assert (server["shown"], server["state"], server["serving"]) == (0, "ready", "ready")
    assert [each["state"] for each in server["engines"]] == ["ready", "loading"]
    assert server["engines"][0]["running"] == 3 and server["engines"][0]["kv"] == 0.25
    with events(fake.url, engine=1) as page:
        event = next(page)
    assert event["engine"] is None and event["server"]["shown"] == 1
    assert event["server"]["progress"]["phase"] == "weights"
    refused = httpx.get(f"{fake.url}/dashboard/events?engine=2")
    assert refused.status_code == 400
    assert "this server has 2, numbered from 0" in refused.json()["error"]["message"]


def row(id: str, created: float) -> RequestRow:
    return RequestRow(
        id, "", "chat", "m", "finished", False, created, 1, 1, 1.0, 2.0, 3.0, 4.0, 5, 0, 6, 0, []
    )


def test_shares_of_several_processes_are_one():
    one = Share([row("a", 3.0)], 1, {"k": KeyRow(running=1, generated=5)}, {1: 2}, {})
    two = Share([row("b", 4.0)], 2, {"k": KeyRow(running=2), "l": KeyRow()}, {1: 1, 2: 1}, {7: 1})
    both = merged([one, Share.decoded(two.encoded())])
    assert [each.id for each in both.requests] == ["b", "a"]
    assert both.open == 3
    assert both.keys == {"k": KeyRow(running=3, generated=5), "l": KeyRow()}
    assert (both.first_token, both.inter_token) == ({1: 3, 2: 1}, {7: 1})
