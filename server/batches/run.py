"""Runs one batch, also one that was interrupted, to its end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import orjson
from msgspec.structs import replace
from starlette.types import ASGIApp

from server.batches.background import BatchSlots, ask
from server.batches.lines import Line, check_input, lines
from server.batches.results import EXPIRED, BatchResult, BatchResults
from server.batches.schema import BatchError, BatchErrors, BatchObject, Status, StoredBatch
from server.batches.store import BatchStore
from server.errors import FieldPath, UnsupportedParameter, internal_error
from server.http.request_context import REQUEST_ID
from server.http.validation import fields_of
from server.metrics.metrics import Metrics
from server.process.pipes import PROCESS_LOST

T = TypeVar("T")
S = TypeVar("S")

MAX_FAILURES = 3  # of the engine while it runs one line
RETRY_SECONDS = 1.0
CHUNK = 500  # skipped lines that are written at once
REFUSED = {
    "stream": "the answer of a line is not streamed, leave it out",
    "background": "the batch runs in the background, leave it out",
    "priority": "lines run after all other requests, leave it out",
}
# The answers are in the output file; stored as well, they would evict all other responses.
DEFAULTS: dict[str, dict[str, object]] = {"/v1/responses": {"store": False}}
CANCELLED = "batch_cancelled"
STORAGE_FULL = "storage_full"
NOT_RUN = {
    CANCELLED: "the batch was cancelled before this request was executed",
    EXPIRED: "this request could not be executed before the completion window expired",
    STORAGE_FULL: "there is no room left for this request's answer: the operator can raise "
    "--max-data-bytes, or files can be deleted",
}


@dataclass
class BatchRun:
    """Runs a batch.  After an interruption, the next BatchRun resumes where this one stopped."""

    store: BatchStore
    stored: StoredBatch
    app: ASGIApp  # runs lines
    slots: BatchSlots
    metrics: Metrics
    max_line_bytes: int
    poll_seconds: float
    scope: dict[str, bytes]  # the `state` of the lines' requests

    def __post_init__(self) -> None:
        batch, path = self.stored.batch, self.store.files.path
        self._id = batch.id
        self._input = path(batch.input_file_id)
        self._total = batch.request_counts.total
        output, errors = path(self.stored.output_id), path(self.stored.error_id)
        self._results = BatchResults(self._id, output, errors)
        self._failures: dict[int, int] = {}  # line -> failures of the engine

    async def run(self) -> None:
        """Returns when the batch has ended.  Raises OSError, and unexpected errors as they are."""
        batch = self.stored.batch
        if batch.status == "validating":
            batch = await asyncio.to_thread(self._validate)
        await asyncio.to_thread(self._results.recover)
        failures = await asyncio.to_thread(self.store.failures, self._id)
        self._failures = {n: failures[n] for n in failures.keys() - self._results.totals.done}
        try:
            if batch.status == "in_progress":
                await self._work()
            elif batch.status == "cancelling" and self._total:  # else the file was not validated
                await self._skip_lines(CANCELLED)
        finally:
            await self._results.close()
        if batch.status != "failed":
            await asyncio.to_thread(self._finish)

    def _validate(self) -> BatchObject:
        try:
            total, model, errors = check_input(
                self._input, self.stored.batch.endpoint, self.max_line_bytes
            )
        except FileNotFoundError:
            text = "the input file is gone from the disk: upload it again"
            total, model, errors = 0, None, [BatchError(code="file_not_found", message=text)]
        now = int(self.store.clock())

        def failed(batch: BatchObject) -> BatchObject:
            return replace(batch, status="failed", failed_at=now, errors=BatchErrors(errors))

        def begun(batch: BatchObject) -> BatchObject:
            batch = replace(batch, model=model, request_counts=self._results.totals.counts(total))
            if batch.status != "validating":  # cancelled in the meantime
                return batch
            return replace(batch, status="in_progress", in_progress_at=now)

        if errors:
            return self.store.end(self.stored, {}, failed)
        self._total = total
        return self.store.change(self._id, begun)

    async def _work(self) -> None:
        """Run the lines until all are done or there is a reason to skip the others."""
        reason = await _first_result(self._submit_lines(), self._watch())
        if reason is not None:
            await self._results.close()
            await self._skip_lines(reason)

    async def _watch(self) -> str:
        """Publish the progress; returns the reason to skip the remaining lines."""
        published = None
        while True:
            if self.store.clock() >= self.stored.batch.expires_at:
                return EXPIRED
            totals = self._results.totals
            if published != len(totals.done):
                published = len(totals.done)
                batch = await asyncio.to_thread(self._publish)
            else:
                batch = await asyncio.to_thread(self.store.find, self.stored.owner, self._id)
            if batch.status == "cancelling":
                return CANCELLED
            if await asyncio.to_thread(self.store.files.is_full):
                return STORAGE_FULL
            await asyncio.sleep(self.poll_seconds)

    def _publish(self) -> BatchObject:
        self.store.note_sizes(self._results.sizes())
        return self.store.change(self._id, self._counted)

    def _counted(self, batch: BatchObject) -> BatchObject:
        totals = self._results.totals
        return replace(batch, request_counts=totals.counts(self._total), usage=totals.usage())

    def _lines_left(self) -> Iterator[Line]:
        """The lines that are not done."""
        for line in lines(self._input, self.max_line_bytes):
            if line.number not in self._results.totals.done:
                yield line

    async def _submit_lines(self) -> None:
        """Run all lines concurrently, then those on which the engine failed, one at a time."""
        lines_left = self._lines_left()
        async with asyncio.TaskGroup() as group:
            while (line := await asyncio.to_thread(next, lines_left, None)) is not None:
                if line.number not in self._failures:
                    num_slots = await self.slots.acquire(line.num_sequences())
                    # Not in the task: one that is cancelled before it starts runs no code.
                    task = group.create_task(self._one(line))
                    task.add_done_callback(lambda _, count=num_slots: self.slots.release(count))
        while self._failures:
            lines_left = self._lines_left()
            while (line := await asyncio.to_thread(next, lines_left, None)) is not None:
                num_slots = await self.slots.acquire(None)
                try:
                    await self._one(line)
                finally:
                    self.slots.release(num_slots)

    async def _one(self, line: Line) -> None:
        answer = await self._answer(line)
        if answer is not None:
            self._failures.pop(line.number, None)
            result = BatchResult(line.number, line.custom_id, *answer)
            await self._results.add(result)
            self.metrics.batch_line(result.completed)

    async def _answer(self, line: Line) -> tuple[int, bytes, str] | None:
        """Status, body and request id; None if the engine failed, or a process that tries grammars
        or decodes images: the line, which may be the cause, is retried alone."""
        for name, why in REFUSED.items():
            if line.body.get(name):
                error = UnsupportedParameter("{} is not for batches: {}", (FieldPath(name), why))
                return error.status, error.body(), uuid.uuid4().hex
        while True:
            status, body, request_id = await self._ask(line)
            if status not in (429, 503) or _process_lost(body):
                break
            await asyncio.sleep(RETRY_SECONDS)  # not the fault of the line
        if status >= 500:
            count = await asyncio.to_thread(self.store.note_failure, self._id, line.number)
            self._failures[line.number] = count
            if count < MAX_FAILURES:
                return None
        return status, body, request_id

    async def _ask(self, line: Line) -> tuple[int, bytes, str]:
        """Status and body of the answer, and the request's id."""
        endpoint, name = self.stored.batch.endpoint, uuid.uuid4().hex
        scope = self.scope | {REQUEST_ID: name}
        fields = DEFAULTS.get(endpoint, {}) | line.body
        body = await asyncio.to_thread(orjson.dumps, fields)
        answer = await _first_result(ask(self.app, endpoint, scope, body), self.slots.engine_lost())
        # The engine may have ended because of this line: it counts as a failure of it.
        status, answer_body = answer or (500, internal_error())
        return status, answer_body, name

    async def _skip_lines(self, code: str) -> None:
        """Write the reason why they were not run for all remaining lines."""
        lines_left = self._lines_left()
        while chunk := await asyncio.to_thread(lambda: list(islice(lines_left, CHUNK))):
            message = NOT_RUN[code]
            skipped = [BatchResult(n, id, code=code, message=message) for n, id, _ in chunk]
            await asyncio.to_thread(self._results.write, skipped)

    def _finish(self) -> None:
        now = int(self.store.clock())

        def finalizing(batch: BatchObject) -> BatchObject:
            if batch.status == "cancelling":
                return batch
            return replace(batch, status="finalizing", finalizing_at=batch.finalizing_at or now)

        def ended(batch: BatchObject) -> BatchObject:
            status: Status = "expired" if self._results.totals.expired else "completed"
            if batch.status == "cancelling":
                status = "cancelled"
            return replace(self._counted(batch), status=status, **{f"{status}_at": now})

        self.store.change(self._id, finalizing)
        self._results.sync()
        self.store.end(self.stored, self._results.sizes(), ended)


def _process_lost(body: bytes) -> bool:
    return fields_of(fields_of(orjson.loads(body)).get("error")).get("code") == PROCESS_LOST


async def _first_result(run: Coroutine[Any, Any, T], other: Coroutine[Any, Any, S]) -> T | S:
    """The result of the coroutine that ends first; the other one is cancelled."""
    tasks = asyncio.create_task(run), asyncio.create_task(other)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else tasks[1].result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
