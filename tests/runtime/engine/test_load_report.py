"""What an engine that is one of several tells the API processes, and how often."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.engine.load_report import INTERVAL_SECONDS, LoadReport
from runtime.engine.loop import Engine
from runtime.messages import EngineLoad
from runtime.scheduler.kv_cache.page_pool import chain_root, extend_chain
from tests.support.engine.bench import Bench, request
from tests.support.engine.fake_model import VOCAB_SIZE


@dataclass
class Reported:
    """An engine with two API processes, by a clock that the test sets."""

    now: float = 100.0
    bench: Bench = field(default_factory=Bench)
    sent: list[tuple[int, EngineLoad]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.report = LoadReport(
            self.bench.engine, lambda *sent: self.sent.append(sent), 2, lambda: self.now
        )

    def publish(self, *, idle: bool = False) -> list[EngineLoad]:
        """Those of API process 0 that this brings."""
        self.sent.clear()
        self.report.publish(idle=idle)
        return [load for client, load in self.sent if client == 0]

    def hashes(self, tokens: list[int]) -> list[bytes]:
        found: list[bytes] = []
        extend_chain(found, chain_root(b""), tokens, self.bench.config.page_size)
        return found


def digests(joined: bytes) -> list[bytes]:
    return [joined[start : start + 16] for start in range(0, len(joined), 16)]


def test_work_is_what_waits_and_what_prompts_have_left():
    reported = Reported()
    reported.bench.add(request(1, [3] * 9, max_tokens=5), request(2, [4] * 6, max_tokens=5))
    [load] = reported.publish(idle=True)
    assert load.work.prompt_tokens == 15 and load.work.rows == 2 and load.work.kv_tokens == 15
    assert load.work.pairs > 0 and load.answer_tokens == 0.0
    reported.bench.step(3)
    [load] = reported.publish(idle=True)
    assert load.work.prompt_tokens == 0.0 and load.work.pairs == 0.0
    assert load.work.kv_tokens > 15, "answers have begun"
    reported.bench.run()
    [load] = reported.publish(idle=True)
    assert load.work.rows == 0 and load.work.kv_tokens == 0
    assert load.answer_tokens == 5.0


def test_pages_that_come_and_go_in_the_prefix_cache_are_told_once():
    reported = Reported()
    tokens = list(range(1, 14))
    reported.bench.add(request(1, tokens, max_tokens=1))
    reported.bench.run()
    [load] = reported.publish(idle=True)
    assert set(digests(load.stored)) >= set(reported.hashes(tokens)) and not load.dropped
    assert reported.publish(idle=True) == []
    pool = reported.bench.engine.requests.pool
    pool.evict(list(pool.cached_pages))
    [load] = reported.publish(idle=True)
    assert set(digests(load.dropped)) >= set(reported.hashes(tokens)) and not load.stored


def test_a_new_api_process_hears_of_all_pages_and_counts_from_0():
    reported = Reported()
    tokens = list(range(1, 14))
    reported.bench.add(request(1, tokens, max_tokens=1))
    for client in (0, 0, 1):
        reported.report.received(client)
    reported.bench.run()
    reported.publish(idle=True)
    assert [(client, load.received) for client, load in reported.sent] == [(0, 2), (1, 1)]
    reported.sent.clear()
    reported.report.hello(1)
    [(client, load)] = reported.sent
    assert client == 1 and load.received == 0
    assert set(digests(load.stored)) >= set(reported.hashes(tokens))


def test_a_busy_engine_reports_at_intervals_and_an_idle_one_what_is_new():
    reported = Reported()
    reported.bench.add(request(1, [3] * 9, max_tokens=50))
    assert len(reported.publish()) == 1
    reported.bench.step(3)
    assert reported.publish() == []
    reported.now += INTERVAL_SECONDS
    assert len(reported.publish()) == 1
    assert reported.publish(idle=True) == [], "nothing has changed"
    reported.bench.step(3)
    assert len(reported.publish(idle=True)) == 1


def test_engines_of_a_server_give_requests_without_a_seed_different_ones():
    seeds: list[int] = []
    for index in (0, 1, 2, 0):
        bench = Bench()
        engine = Engine(bench.config, VOCAB_SIZE, bench.executor, index=index)
        engine.add(request(1, [3] * 5))
        seeds.append(engine.requests.live[1].seed)
    assert len(set(seeds[:3])) == 3 and seeds[3] == seeds[0]
