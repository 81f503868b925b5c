"""Output and error file of a batch.

A line with a record is done: after a crash the files are read again, an incomplete record at the
end is cut off, and the lines without a record run.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from server.batches.schema import BatchUsage, CachedTokens, ReasoningTokens, RequestCounts
from server.http.validation import fields_of

EXPIRED = "batch_expired"


class BatchResult(NamedTuple):
    """The outcome of one line."""

    line: int
    custom_id: str
    status: int = 0  # of the answer; 0 if there was none
    body: bytes = b""
    request_id: str = ""  # the answer's X-Request-Id
    code: str = ""  # why there was none
    message: str = ""

    @property
    def completed(self) -> bool:
        return 200 <= self.status < 300

    def record(self, batch_id: str) -> bytes:
        """OpenAI's line of an output or error file."""
        response, error = None, {"code": self.code, "message": self.message}
        if self.status:
            body = orjson.Fragment(self.body)
            response = {"status_code": self.status, "request_id": self.request_id, "body": body}
            error = None
        name = f"batch_req_{batch_id.removeprefix('batch_')}_{self.line}"
        record = {"id": name, "custom_id": self.custom_id, "response": response, "error": error}
        return orjson.dumps(record) + b"\n"


@dataclass
class BatchTotals:
    """The totals of the records in the two files."""

    done: set[int] = field(default_factory=set[int])  # line numbers
    completed: int = 0
    failed: int = 0
    expired: bool = False
    tokens: list[int] = field(default_factory=lambda: [0] * 5)

    def counts(self, total: int) -> RequestCounts:
        return RequestCounts(total, self.completed, self.failed)

    def usage(self) -> BatchUsage:
        prompt, cached, answer, reasoning, total = self.tokens
        return BatchUsage(prompt, CachedTokens(cached), answer, ReasoningTokens(reasoning), total)

    def add(self, line: int, completed: bool, body: object, code: str) -> None:
        self.done.add(line)
        self.completed += completed
        self.failed += not completed
        self.expired = self.expired or code == EXPIRED
        for index, count in enumerate(_tokens(body)):
            self.tokens[index] += count


def _tokens(body: object) -> Iterator[int]:
    """Prompt, cached, output, reasoning and total tokens, by the names of chat or of Responses."""
    usage = fields_of(fields_of(body).get("usage"))
    names = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    for name, detail in zip(names, ("cached", "reasoning"), strict=True):
        yield _number(usage.get(f"{name}_tokens"))
        yield _number(fields_of(usage.get(f"{name}_tokens_details")).get(f"{detail}_tokens"))
    yield _number(usage.get("total_tokens"))


def _number(value: object) -> int:
    return value if type(value) is int else 0


class BatchResults:
    """The two files.  The methods that are no coroutines block; one thread at a time calls any.

    `add` and `close` are for the event loop: all results that are waiting are written at once, in a
    thread, also those whose task is cancelled meanwhile.
    """

    def __init__(self, batch_id: str, output: Path, errors: Path) -> None:
        self._batch_id = batch_id
        self._paths = {True: output, False: errors}
        self._waiting: list[BatchResult] = []
        self._writing: asyncio.Task[None] | None = None
        self.totals = BatchTotals()

    def recover(self) -> None:
        """Read the files, and cut off an incomplete record at the end."""
        self.totals = BatchTotals()
        for completed, path in self._paths.items():
            if path.exists():
                os.truncate(path, self._read(path, completed))

    def _read(self, path: Path, completed: bool) -> int:
        """Returns the number of bytes of complete records."""
        sound = 0
        with path.open("rb") as file:
            for raw in file:
                try:
                    record: dict[str, Any] = orjson.loads(raw)
                    line = int(record["id"].rpartition("_")[2])
                    code = fields_of(record["error"]).get("code", "")
                except (ValueError, TypeError, KeyError, AttributeError):
                    break
                if not raw.endswith(b"\n") or line in self.totals.done:
                    break
                self.totals.add(line, completed, fields_of(record["response"]).get("body"), code)
                sound += len(raw)
        return sound

    def write(self, results: list[BatchResult]) -> None:
        """Append records.  After an error some may be written: call recover()."""
        for completed, path in self._paths.items():
            chosen = [result for result in results if result.completed == completed]
            if chosen:
                append(path, b"".join([result.record(self._batch_id) for result in chosen]))
            for result in chosen:
                body = orjson.loads(result.body) if completed else None
                self.totals.add(result.line, completed, body, result.code)

    def sizes(self) -> dict[str, int]:
        """Bytes of each file, by its id."""
        return {p.name: p.stat().st_size if p.exists() else 0 for p in self._paths.values()}

    def sync(self) -> None:
        """Flush to disk (fsync)."""
        for path in self._paths.values():
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    async def add(self, result: BatchResult) -> None:
        """Returns when it is written.  Raises OSError."""
        self._waiting.append(result)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        while result.line not in self.totals.done:
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        # Not restarted after a failure: records after an incomplete one could not be read.
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await asyncio.to_thread(self.write, batch)
        self._writing = None

    async def close(self) -> None:
        """Returns when all results are written.  Raises OSError."""
        while self._writing is not None:
            await asyncio.shield(self._writing)


def append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)
