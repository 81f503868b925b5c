"""LoadReport: tells the API processes what the engine has to do and which pages it has cached.

Only an engine that is one of several reports it: they choose one for each request.  A report says
how many requests of the API process it counts, so that the process can add those on their way.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.engine.loop import Engine
from runtime.messages import EngineLoad, StepSeconds, Work
from runtime.scheduler.kv_cache.page_pool import PageHash

INTERVAL_SECONDS = 0.05  # between two reports, while the engine has work

SendLoad = Callable[[int, EngineLoad], None]  # to an API process


class LoadReport:
    def __init__(
        self,
        engine: Engine,
        send: SendLoad,
        num_clients: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._send, self._clock = engine, send, clock
        self._received = [0] * num_clients
        self._next_at = 0.0
        self._last: tuple[Work, list[int]] | None = None
        # Of the pages that were cached or evicted since the last report: whether they are cached.
        self._changes = engine.requests.pool.record_changes(engine.requests.kv_pages.whole_group)

    def received(self, client: int) -> None:
        """The engine has a request of this API process, perhaps one that it has refused."""
        self._received[client] += 1

    def hello(self, client: int) -> None:
        """A new API process: it knows of nothing, and its predecessor's requests are gone."""
        self._received[client] = 0
        group = self._engine.requests.kv_pages.whole_group
        cached = self._engine.requests.pool.hashes(group)
        # What has changed since the last report is reported to all, and true twice.
        self._send(client, self._load(client, self._work(), b"".join(cached), b""))

    def publish(self, *, idle: bool) -> None:
        """Send a report if it says something new and one is due; idle: the engine will wait."""
        now = self._clock()
        if now < self._next_at and not idle:
            return
        state = self._work(), list(self._received)
        if state == self._last and not self._changes:
            return
        self._last, self._next_at = state, now + INTERVAL_SECONDS
        stored, dropped = self._take_changes()
        for client in range(len(self._received)):
            self._send(client, self._load(client, state[0], stored, dropped))

    def _load(self, client: int, work: Work, stored: bytes, dropped: bytes) -> EngineLoad:
        parts = self._engine.scheduler.times.parts()
        return EngineLoad(
            work,
            self._received[client],
            # All but what a step with tokens of images takes longer, which is of no `Work`.
            StepSeconds(*parts[:7]) if parts else None,
            self._engine.requests.mix.mean_answer,
            stored,
            dropped,
        )

    def _take_changes(self) -> tuple[bytes, bytes]:
        stored: list[PageHash] = []
        dropped: list[PageHash] = []
        for page_hash, cached in self._changes.items():
            (stored if cached else dropped).append(page_hash)
        self._changes.clear()
        return b"".join(stored), b"".join(dropped)

    def _work(self) -> Work:
        """What all requests have left to compute.

        Of prompts that wait, as much is expected to be cached as of those that finished lately.
        """
        requests = self._engine.requests
        waiting, share = requests.waiting, requests.mix.computed_share
        tokens, pairs = waiting.num_tokens * share, 0.0
        if waiting.count:
            mean = waiting.num_tokens / waiting.count
            pairs = waiting.count * mean * mean * share * (2 - share) / 2
        kv_tokens = waiting.num_tokens + requests.decoding.num_kv_tokens
        for sequence in requests.prefilling.values():
            known, computed = len(sequence.tokens), sequence.num_computed_tokens
            tokens += known - computed
            pairs += (known - computed) * (known + computed) / 2
            kv_tokens += known
        encoder = self._engine.scheduler.prefill.encoder
        stages, operations = encoder.work_left(requests.prefilling.values())
        more = waiting.images.work(requests.resolved.encoder_stages)
        return Work(
            tokens,
            pairs,
            requests.num_running + waiting.count,
            kv_tokens,
            stages + share * more[0],
            operations + share * more[1],
        )
