"""Responses that are generated without a connection, and readers of their events.

Each process generates the background responses that it received.  Ten times a second it writes
their state to the store, and reads which of them a request to any process has cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from server.apis.responses.answer import ResponseAnswer, Write
from server.apis.responses.database import RUNNING
from server.apis.responses.items import JsonItem
from server.apis.responses.store import ResponseStore
from server.errors import FieldPath, RequestError, Unavailable
from server.http.middleware import DrainState
from server.http.sse import split_frames

log = logging.getLogger("wavefill.responses")

TICK_SECONDS = 0.1
CANCEL_SECONDS = 5.0
FRAMES_AT_ONCE = 1024
MAX_FAILURES = 50
Frames = list[tuple[int, bytes]]


class _Run:
    """One response that is being generated."""

    def __init__(self, answer: ResponseAnswer, streamed: bool) -> None:
        self.answer = answer
        self._streamed = streamed
        self.frames: Frames = []  # that the store does not have yet
        self._count = 0
        self.stored_status = ""
        self.failures = 0  # of the store, consecutive
        self.task = asyncio.create_task(self.make())

    def write_now(self, data: bytes) -> bool:
        """Take frames for the store; those of a response without `stream` are not kept."""
        if self._streamed:
            frames = split_frames(data)
            self.frames += enumerate(frames, self._count)
            self._count += len(frames)
        return True

    async def write(self, data: bytes) -> None:
        self.write_now(data)

    async def make(self) -> None:
        """Generate to the end."""
        answer = self.answer
        try:
            await answer.stream(self)
        except asyncio.CancelledError:
            await answer.cancelled(self.write)
        except Exception:
            log.exception("background response %s failed", answer.response["id"])
            await answer.failed(self.write)
        finally:
            answer.generation.close()


class BackgroundResponses:
    """The background responses of this process."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._runs: dict[str, _Run] = {}
        self._ticker: asyncio.Task[None] | None = None

    async def start(
        self,
        answer: ResponseAnswer,
        items: list[JsonItem],
        owner: bytes,
        streamed: bool,
        gate: DrainState,
    ) -> None:
        """Generate a response without its connection.  A drain waits for it as for a connection.

        Raises RequestError if it cannot be stored; the caller closes the generation then.
        """
        stored = await self._store.call(
            lambda database: database.add(
                owner, answer.response, items, worker=self._store.worker, streamed=streamed
            )
        )
        if not stored:
            raise RequestError(
                "the input is larger than the store of responses keeps of one response: send "
                "less, or use {background} false",
                param=FieldPath("input"),
            )
        gate.open_requests += 1
        self._runs[answer.response["id"]] = _Run(answer, streamed)
        if self._ticker is None or self._ticker.done():
            self._ticker = asyncio.create_task(self._tick(gate))

    async def _tick(self, gate: DrainState) -> None:
        """Store the state of the responses until all have ended."""
        while self._runs:
            await asyncio.sleep(TICK_SECONDS)
            for id, run in list(self._runs.items()):
                ended = run.task.done()
                try:
                    active = await self._save(run)
                    run.failures = 0
                except Unavailable as error:
                    active = True
                    run.failures += 1
                    log.error("background response %s: %s", id, error.message)
                if ended and (not run.failures or run.failures > MAX_FAILURES):
                    del self._runs[id]
                    gate.open_requests -= 1
                elif not active:
                    run.task.cancel()

    async def _save(self, run: _Run) -> bool:
        """Store what is new of a response; False once it was cancelled or deleted."""
        response, frames = dict(run.answer.response), run.frames.copy()
        id, status = response["id"], response["status"]
        if not frames and status == run.stored_status:
            return await self._store.call(lambda database: database.is_active(id))
        active = await self._store.call(lambda database: database.update(response, frames))
        run.stored_status = status
        del run.frames[: len(frames)]
        return active

    async def cancel(self, id: str) -> None:
        """Stop a response of any process; returns when it has ended, or after CANCEL_SECONDS."""
        await self._store.call(lambda database: database.cancel(id))
        run = self._runs.get(id)
        if run is not None:
            run.task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CANCEL_SECONDS):
                while await self._store.call(lambda database: database.status(id)) in RUNNING:
                    await asyncio.sleep(TICK_SECONDS / 2)

    async def follow(self, id: str, after: int, write: Write) -> None:
        """Write the events with numbers above `after` until the response has ended."""
        while True:
            frames, status = await self._store.call(
                lambda database, after=after: database.events(id, after, FRAMES_AT_ONCE)
            )
            if frames:
                after = frames[-1][0]
                await write(b"".join([frame for _, frame in frames]))
            elif status in RUNNING:
                await asyncio.sleep(TICK_SECONDS)
            if status not in RUNNING and len(frames) < FRAMES_AT_ONCE:
                return
