"""DashboardFeed: one sampler for all pages that are open at this API process.

While a page is open the engine is asked for a snapshot once a second, and every page gets the same
event.  Without a page there is no timer, and nothing is collected; but if a page is open at another
API process, this one answers each snapshot with its share of the requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec.structs import asdict

from runtime.snapshot import Snapshot
from server.config import ServerConfig
from server.dashboard.share import Share, merged, share_of
from server.engine import Engine, OneEngine, engine_state, serving_state
from server.generation.request_log import RequestLog
from server.http.sse import frame_of
from server.metrics.latency_window import percentiles
from server.metrics.metrics import Metrics

INTERVAL_SECONDS = 1.0
SILENCE_SECONDS = 2.5  # without a snapshot: then pages get events without one
SHARES = (0.5, 0.9, 0.99)  # percentiles
READY_FIELDS = (
    "model_type", "device", "dtype", "attention", "max_model_len", "page_size", "num_pages",
    "max_num_seqs", "max_batched_tokens", "memory", "epoch", "group_windows",
)  # fmt: skip


class Subscription:
    """The newest event for one page; a slow one misses those before it.

    engine  the index of the one that the page shows
    """

    def __init__(self, engine: int) -> None:
        self.engine = engine
        self._frame = b""
        self._arrived = asyncio.Event()

    def put(self, frame: bytes) -> None:
        self._frame = frame
        self._arrived.set()

    async def next(self) -> bytes:
        await self._arrived.wait()
        self._arrived.clear()
        return self._frame


class DashboardFeed:
    def __init__(
        self,
        config: ServerConfig,
        client: Engine,
        metrics: Metrics,
        requests: RequestLog,
        batch_requests: RequestLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._client, self._metrics = config, client, metrics
        self._requests, self._batch_requests = requests, batch_requests
        self._clock = clock
        self._open: set[Subscription] = set()
        self._sampling: asyncio.Task[None] | None = None
        self._last_snapshot_at: dict[int, float] = {}  # by engine
        self._seconds = 0.0  # of CPU time, that the last event took to make

    def subscribe(self, engine: int = 0) -> Subscription:
        """A page has been opened, which shows this engine."""
        self._client.on_snapshot = self.take
        subscription = Subscription(engine)
        self._open.add(subscription)
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(self._sample())
        else:  # an event at once, for a page that joins others
            subscription.put(self._event(engine, None))
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._open.discard(subscription)
        if not self._open and self._sampling is not None:
            self._sampling.cancel()
            self._sampling = None

    async def _sample(self) -> None:
        self._last_snapshot_at.clear()
        while True:
            several = self._config.api_workers > 1
            share = self._share().encoded() if several else b""
            for engine in self._shown():
                last = self._last_snapshot_at.get(engine, 0.0)
                if self._clock() - last > SILENCE_SECONDS:
                    # The engine loads, is down, or is in a long step.
                    self._publish(engine, self._event(engine, None))
                self._client.observe(share, watching=True, engine=engine)
            await asyncio.sleep(INTERVAL_SECONDS)

    def _shown(self) -> set[int]:
        """The engines that a page shows."""
        return {subscription.engine for subscription in self._open}

    def take(self, engine: int, snapshot: Snapshot) -> None:
        """A snapshot of an engine, which this process or another one has asked for."""
        if engine in self._shown():
            self._last_snapshot_at[engine] = self._clock()
            self._publish(engine, self._event(engine, snapshot))
        elif self._config.api_workers > 1:
            self._client.observe(self._share().encoded(), watching=False, engine=engine)

    def _publish(self, engine: int, frame: bytes) -> None:
        for subscription in self._open:
            if subscription.engine == engine:
                subscription.put(frame)

    def _share(self) -> Share:
        return share_of(self._requests, self._batch_requests, self._metrics)

    def _event(self, engine: int, snapshot: Snapshot | None) -> bytes:
        began = time.thread_time()
        others = [] if snapshot is None else snapshot.shares
        shares = [Share.decoded(data) for index, data in others if index != self._client.index]
        share = merged([self._share(), *shares])
        fields: dict[str, Any] = {
            "at": round(self._clock(), 3),
            "time": round(time.time(), 3),
            "interval": INTERVAL_SECONDS,
            "server": self._server(engine),
            "requests": [asdict(row) for row in share.requests],
            "open": share.open,
            "remembered": self._config.request_history,
            "keys": {name: asdict(row) for name, row in share.keys.items()},
            "first_token": _latency(share.first_token),
            "inter_token": _latency(share.inter_token),
            "engine": None if snapshot is None else _engine(snapshot),
            "sampler_seconds": round(self._seconds, 6),
        }
        frame = frame_of(msgspec.json.encode(fields))
        self._seconds = time.thread_time() - began
        return frame

    def _server(self, engine: int) -> dict[str, Any]:
        engines = self._client.engines
        shown = engines[engine]
        ready, progress = shown.ready, shown.progress
        facts = {} if ready is None else {name: getattr(ready, name) for name in READY_FIELDS}
        return facts | {
            "version": version("wavefill"),
            "model": self._config.served_names[0],
            "keys": bool(self._config.api_keys),
            "shown": engine,
            "engines": [_summary(each) for each in engines],
            "serving": serving_state(self._client),
            "state": engine_state(shown),
            "down": shown.down,
            "progress": None if progress is None else asdict(progress),
        }


def _summary(engine: OneEngine) -> dict[str, Any]:
    """An engine among the others."""
    stats = engine.stats
    return {
        "state": engine_state(engine),
        "running": stats.running,
        "waiting": stats.waiting,
        "kv": stats.pages_used / stats.pages_total if stats.pages_total else 0.0,
    }


def _engine(snapshot: Snapshot) -> dict[str, Any]:
    wave = snapshot.wave
    return {
        "at": round(snapshot.at, 3),
        "stats": asdict(snapshot.stats),
        "sequences": [asdict(each) for each in snapshot.sequences],
        "waiting": [asdict(each) for each in snapshot.waiting],
        "pages": asdict(snapshot.pages),
        "page_groups": [asdict(each) for each in snapshot.page_groups],
        "steps": [asdict(each) for each in snapshot.steps],
        "weights": snapshot.weights,
        "wave": None
        if wave is None
        else asdict(wave) | {"plan": asdict(wave.plan), "fa3": asdict(wave.fa3)},
        "build_seconds": round(snapshot.build_seconds, 6),
    }


def _latency(counts: dict[int, int]) -> dict[str, object]:
    return {"count": sum(counts.values()), "seconds": percentiles(counts, SHARES)}
