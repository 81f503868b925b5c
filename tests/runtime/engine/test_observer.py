"""The engine makes snapshots only for pages that ask, and within its share of a core."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from runtime.engine.observer import INTERVAL_SECONDS, MAX_SHARE, SHARE_SECONDS, Observer
from runtime.messages import FromEngine, Observe
from runtime.snapshot import PlanPicture, Snapshot, WavePicture
from tests.support.engine.bench import Bench, request


@dataclass
class Watched:
    """An engine whose snapshots take `cost` seconds by a clock that the test sets."""

    cost: float = 0.0
    now: float = 100.0
    bench: Bench = field(default_factory=Bench)
    sent: list[Snapshot] = field(default_factory=list)
    planned: list[list[int]] = field(default_factory=list)
    _cpu: float = 0.0

    def __post_init__(self) -> None:
        self.observer = Observer(
            self.bench.engine, self._send, self._plan, lambda: self.now, self._cpu_clock
        )

    def _cpu_clock(self) -> float:
        self._cpu += self.cost
        return self._cpu

    def _send(self, message: FromEngine) -> None:
        assert isinstance(message, Snapshot)
        self.sent.append(message)

    def _plan(self, kv_lens: list[int]) -> WavePicture:
        self.planned.append(kv_lens)
        plan = PlanPicture("stream-k", 1.0, 0.0, [])
        return WavePicture("gpu", True, 4, 4, 64, 1.0, 1.0, [], kv_lens, plan, plan)

    def ask(self, client: int = 0, share: bytes = b"", *, watching: bool = True) -> None:
        self.observer.observe(Observe(client, watching, share))


def test_a_snapshot_has_the_sequences_and_the_pages_of_the_engine():
    watched = Watched()
    watched.bench.add(request(7, list(range(1, 10)), max_tokens=5), request(8, [3] * 6))
    watched.bench.step(3)
    watched.ask()
    [snapshot] = watched.sent
    assert {(one.id, one.state) for one in snapshot.sequences} == {(7, "decode"), (8, "decode")}
    assert snapshot.stats == watched.bench.engine.stats()
    assert snapshot.pages.owned == snapshot.stats.pages_used
    assert len(snapshot.steps) > 0 and len(snapshot.weights) == 8


def test_the_waves_are_those_of_the_rows_that_decode():
    watched = Watched()
    watched.ask()
    assert watched.sent[-1].wave is None and watched.planned == []
    watched.bench.add(request(7, list(range(1, 10)), max_tokens=5), request(8, [3] * 6))
    watched.bench.step(3)
    watched.now += 2
    watched.ask()
    wave = watched.sent[-1].wave
    assert wave is not None
    known = {one.id: one.known_tokens for one in watched.sent[-1].sequences}
    assert dict(zip(wave.rows, wave.kv_tokens, strict=True)) == known


def test_pages_that_ask_at_the_same_time_share_a_snapshot():
    watched = Watched()
    watched.ask(0)
    watched.ask(1)
    watched.now += INTERVAL_SECONDS / 2
    watched.ask(0)
    assert len(watched.sent) == 1
    watched.now += INTERVAL_SECONDS
    watched.ask(1)
    assert len(watched.sent) == 2


def test_snapshots_take_no_more_than_their_share_of_a_core():
    watched = Watched(cost=0.05)
    seconds = 60
    for _ in range(10 * seconds):
        watched.now += 0.1
        watched.ask()
    assert len(watched.sent) > 5
    assert len(watched.sent) * watched.cost <= seconds * MAX_SHARE + watched.cost


def test_an_api_process_without_a_page_gives_its_share_and_starts_nothing():
    watched = Watched()
    watched.ask(1, b"mine", watching=False)
    assert watched.sent == []
    watched.ask(0, b"ours")
    assert watched.sent[-1].shares == [(1, b"mine"), (0, b"ours")]


def test_the_share_of_a_process_that_has_gone_is_dropped():
    watched = Watched()
    watched.ask(1, b"mine", watching=False)
    watched.now += SHARE_SECONDS + 1
    watched.ask(0)
    assert watched.sent[-1].shares == []


def test_a_snapshot_that_fails_ends_no_engine(caplog: pytest.LogCaptureFixture):
    watched = Watched()
    watched.bench.add(request(7, list(range(1, 10)), max_tokens=5))
    watched.bench.step(3)

    def fail(kv_lens: list[int]) -> WavePicture:
        raise ValueError("a seeded fault")

    watched.observer = Observer(watched.bench.engine, watched._send, fail, lambda: watched.now)
    watched.ask()
    assert watched.sent == [] and "a seeded fault" in caplog.text
    caplog.clear()
    watched.now += 2
    watched.ask()
    assert caplog.text == "", "it is tried again once a minute, not every second"
