"""The state that the lines of a batch use, how a line is run, and how many at a time.

Lines run through the same routes as other requests, in this process.  They run after all others, do
not count against --max-queue, and are not part of the latencies in /metrics.  BatchSlots limits the
sequences that they have in the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message

from server.engine import Engine
from server.http.request_context import exchange
from server.metrics.metrics import Metrics
from server.state import ServerState

log = logging.getLogger("wavefill.batches")

POLL_SECONDS = 0.05  # between two checks of an engine without room
EPOCH_POLL_SECONDS = 0.2
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")


class BackgroundMetrics(Metrics):
    """Ignores lines, whose latencies are not those that clients see."""

    def __init__(self, metrics: Metrics) -> None:
        """Without any series: those of the process are in its own `metrics`."""
        self.image_refused = metrics.image_refused  # which is no latency


def _ignore(self: BackgroundMetrics, *args: object, **times: object) -> None:
    pass


# Derived, so that a new method of Metrics needs no line here: it would fail without its series.
for _name, _member in vars(Metrics).items():
    if inspect.isfunction(_member) and not _name.startswith("_"):
        setattr(BackgroundMetrics, _name, _ignore)


def in_background(state: ServerState) -> ServerState:
    """The state of an application for lines."""
    return replace(
        state,
        metrics=BackgroundMetrics(state.metrics),
        requests=state.batch_requests,
        bounded=False,
    )


async def ask(app: ASGIApp, endpoint: str, state: dict[str, Any], body: bytes) -> tuple[int, bytes]:
    """Status and body of the application's answer to a POST.

    state   what the middleware notes about a request: its id and its owner
    """
    exchange.set(state)
    unread, status, chunks = [body], 0, list[bytes]()

    async def receive() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client of a line never disconnects
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            chunks.append(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "scheme": "http",
        "method": "POST",
        "path": endpoint,
        "raw_path": endpoint.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": dict(state),
    }
    try:
        await app(scope, receive, send)
    except Exception:
        log.exception("a line of a batch failed")
        if not status:
            raise  # else the application has answered with 500
    return status, b"".join(chunks)


class BatchSlots:
    """Limits the sequences of batches in the engine at a time.  First come, first served."""

    def __init__(self, client: Engine, limit: int) -> None:
        """limit: sequences; never more than half of --max-num-seqs are used."""
        self._client = client
        self._limit = limit
        self._order = asyncio.Lock()
        self.used = 0

    def _max_used(self) -> int:
        """The limit now; 0 while there is no engine."""
        ready = self._client.ready
        return 0 if ready is None else max(1, min(self._limit, ready.max_num_seqs // 2))

    def _room(self) -> int:
        """How many more sequences could run now."""
        ready, stats = self._client.ready, self._client.stats
        if ready is None or stats.waiting:
            return 0
        idle = ready.max_num_seqs - max(stats.running, self._client.pending + self.used)
        return min(self._max_used() - self.used, idle)

    async def acquire(self, requested: int | None) -> int:
        """Wait for `requested` slots, None for all; returns the number to release."""
        async with self._order:
            while True:
                limit = self._max_used()
                count = limit if requested is None else min(requested, limit)
                # A request for more than is ever free would wait for ever: it runs alone instead.
                if limit and (self._room() >= count or (not self.used and self._room() > 0)):
                    self.used += count
                    return count
                await asyncio.sleep(POLL_SECONDS)

    def release(self, count: int) -> None:
        self.used -= count

    async def engine_lost(self) -> None:
        """Returns when the current engine has ended; waits for one first."""
        while (epoch := self._epoch()) is None:
            await asyncio.sleep(EPOCH_POLL_SECONDS)
        while self._epoch() == epoch:
            await asyncio.sleep(EPOCH_POLL_SECONDS)

    def _epoch(self) -> int | None:
        ready = self._client.ready
        return None if ready is None else ready.epoch
