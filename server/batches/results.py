"""Output and error file of a batch.

What is in them is done: after a crash they are read again, a torn end is cut off, and the lines
that are in neither run.  Each record is written once and whole, or it is not there.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from server.batches.objects import BatchUsage, CachedTokens, ReasoningTokens, RequestCounts
from server.http.validation import fields_of

EXPIRED = "batch_expired"
CANCELLED = "batch_cancelled"
STORAGE_FULL = "storage_full"


class BatchResult(NamedTuple):
    """What became of one line."""

    line: int
    custom_id: str
    status: int = 0  # of the answer; 0 if there was none
    body: bytes = b""
    code: str = ""  # why there was none
    message: str = ""
    request_id: str = ""  # as X-Request-Id would have said, if it was answered

    @property
    def completed(self) -> bool:
        return 200 <= self.status < 300

    def record(self, batch_id: str) -> bytes:
        """OpenAI's line of an output or error file."""
        response, error = None, None
        if self.status:
            response = {
                "status_code": self.status,
                "request_id": self.request_id,
                "body": orjson.Fragment(self.body),
            }
        else:
            error = {"code": self.code, "message": self.message}
        name = f"batch_req_{batch_id.removeprefix('batch_')}_{self.line}"
        record = {"id": name, "custom_id": self.custom_id, "response": response, "error": error}
        return orjson.dumps(record) + b"\n"


@dataclass
class Tally:
    """What the two files hold."""

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
    """Prompt, cached, answer, reasoning and all tokens; chat's names or those of Responses."""
    usage = fields_of(fields_of(body).get("usage"))
    new = "input_tokens" in usage
    for name, detail in (("input", "cached"), ("output", "reasoning")):
        key = name if new else {"input": "prompt", "output": "completion"}[name]
        yield _number(usage.get(f"{key}_tokens"))
        yield _number(fields_of(usage.get(f"{key}_tokens_details")).get(f"{detail}_tokens"))
    yield _number(usage.get("total_tokens"))


def _number(value: object) -> int:
    return value if type(value) is int else 0


class BatchResults:
    """The two files.  Every method blocks, and only one thread at a time calls any."""

    def __init__(self, batch_id: str, output: Path, errors: Path) -> None:
        self._batch_id = batch_id
        self._paths = {True: output, False: errors}
        self.tally = Tally()

    def recover(self) -> None:
        """Read what is there, and cut off what was not written whole."""
        self.tally = Tally()
        for completed, path in self._paths.items():
            if path.exists():
                os.truncate(path, self._read(path, completed))

    def _read(self, path: Path, completed: bool) -> int:
        """Returns the number of bytes that are sound."""
        sound = 0
        with path.open("rb") as file:
            for raw in file:
                try:
                    record: dict[str, Any] = orjson.loads(raw)
                    line = int(record["id"].rpartition("_")[2])
                    code = fields_of(record["error"]).get("code", "")
                except (ValueError, TypeError, KeyError, AttributeError):
                    break
                if not raw.endswith(b"\n") or line in self.tally.done:
                    break
                self.tally.add(line, completed, fields_of(record["response"]).get("body"), code)
                sound += len(raw)
        return sound

    def write(self, results: list[BatchResult]) -> None:
        """Append records.  What raises has perhaps written some: recover() tells."""
        for completed, path in self._paths.items():
            chosen = [result for result in results if result.completed == completed]
            if chosen:
                append(path, b"".join([result.record(self._batch_id) for result in chosen]))
            for result in chosen:
                body = orjson.loads(result.body) if completed else None
                self.tally.add(result.line, completed, body, result.code)

    def sizes(self) -> list[int]:
        """Bytes of output and errors."""
        return [path.stat().st_size if path.exists() else 0 for path in self._paths.values()]

    def sync(self) -> None:
        """Have what was written survive the machine's end, too."""
        for path in self._paths.values():
            if path.exists():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)


def append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    finally:
        os.close(descriptor)


class Writer:
    """Takes results on the event loop and writes them in a thread, as many at once as there are.

    A result that was handed over is written even if who brought it is cancelled meanwhile.
    """

    def __init__(self, results: BatchResults) -> None:
        self._results = results
        self._waiting: list[BatchResult] = []
        self._writing: asyncio.Task[None] | None = None

    async def add(self, result: BatchResult) -> None:
        """Returns when it is written.  Raises OSError."""
        self._waiting.append(result)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())
        while result.line not in self._results.tally.done:
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        # Not started again after a failure: behind a torn record nothing could be read.
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await asyncio.to_thread(self._results.write, batch)
        self._writing = None

    async def close(self) -> None:
        """Returns when all that was handed over is written.  Raises OSError."""
        while self._writing is not None:
            await asyncio.shield(self._writing)
