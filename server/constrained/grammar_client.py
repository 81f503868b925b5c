"""GrammarChecker: sends grammars to the process of grammar_worker.py, which may hang or die."""

from __future__ import annotations

import asyncio
import hashlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from server.constrained.grammar_text import Grammar
from server.constrained.grammar_worker import CHECK_SECONDS, GrammarCheckArgs, GrammarVerdict
from server.errors import FieldPath, RequestError
from server.generation.admission import full
from server.http.sse import while_wanted
from server.http.validation import MAX_NAME
from server.process.pipes import ATTEMPTS, KILLS, end_process, process_lost, wait_until_ready
from server.prompt.tokenizer import ChatTokenizer

# Until a verdict, whatever keeps the process waiting; it ends itself after CHECK_SECONDS of work.
WAIT_SECONDS = 10.0
START_SECONDS = 30.0
MAX_WAITING = 64
MAX_REMEMBERED = 256
MAX_REMEMBERED_CHARS = 32 << 20  # of all of them
T = TypeVar("T")


class GrammarChecker:
    """Tries grammars before the engine sees them, one at a time and off the event loop.

    Its process starts with the first grammar and ends with this object.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., GrammarChecker] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._schemas = ThreadPoolExecutor(1, thread_name_prefix="schemas")
        self._waiting = 0
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()  # by digest
        self._lock = threading.Lock()  # of the verdicts

    async def prepare(self, work: Callable[[], T]) -> T:
        """Make a grammar of a request's fields.  Only others like it wait: a schema may be large,
        and the threads of the event loop also read files and long prompts.

        Raises ClientGone.
        """
        return await while_wanted(_in(self._schemas, work))

    async def check(self, grammar: Grammar, vocab_size: int, tokenizer: ChatTokenizer) -> str:
        """The text for SamplingParams.grammar.

        Raises RequestError that names the place if it cannot be used, RateLimited, Unavailable and
        ClientGone.
        """
        line = msgspec.json.encode(grammar)
        digest = hashlib.sha256(line).digest()
        verdict = self._remembered(digest)
        if verdict is None:
            verdict = await self._wait(
                digest, line, GrammarCheckArgs(vocab_size, tokenizer.special_words())
            )
        if verdict.error is not None:
            raise _refusal(grammar, verdict)
        return verdict.grammar

    async def _wait(self, digest: bytes, line: bytes, start: GrammarCheckArgs) -> GrammarVerdict:
        """Ask when it is this grammar's turn.  Raises RateLimited if many are before it."""
        if self._waiting >= MAX_WAITING:
            raise full(
                "grammars_full", "{} grammars wait to be checked: try again later", self._waiting
            )
        self._waiting += 1
        try:
            return await while_wanted(_in(self._thread, lambda: self._verdict(digest, line, start)))
        finally:
            self._waiting -= 1

    def _remembered(self, digest: bytes) -> GrammarVerdict | None:
        with self._lock:
            verdict = self._verdicts.get(digest)
            if verdict is not None:
                self._verdicts.move_to_end(digest)
            return verdict

    def _verdict(self, digest: bytes, line: bytes, start: GrammarCheckArgs) -> GrammarVerdict:
        """In the thread: the verdict, which another request for the same may just have got."""
        verdict = self._remembered(digest)
        if verdict is None:
            verdict = self._ask(start, line)
            if verdict.is_final:
                self._remember(digest, verdict)
        return verdict

    def _remember(self, digest: bytes, verdict: GrammarVerdict) -> None:
        with self._lock:
            self._verdicts[digest] = verdict
            size = sum(len(each.grammar) for each in self._verdicts.values())
            while len(self._verdicts) > MAX_REMEMBERED or size > MAX_REMEMBERED_CHARS:
                size -= len(self._verdicts.popitem(last=False)[1].grammar)

    def _ask(self, start: GrammarCheckArgs, line: bytes) -> GrammarVerdict:
        for _ in range(ATTEMPTS):
            if self._process is not None and self._process.poll() is not None:
                self.close()  # it ended while it was not in use
            try:
                process = self._process or self._start(start)
            except (OSError, EOFError):
                break
            verdict = self._answer(process, line)
            if verdict is not None:
                return verdict
        raise process_lost("tries grammars")

    def _answer(self, process: subprocess.Popen[bytes], line: bytes) -> GrammarVerdict | None:
        """None if the process was killed."""
        try:
            verdict = _exchange(process, line, WAIT_SECONDS)
            return msgspec.json.decode(verdict, type=GrammarVerdict)
        except TimeoutError:
            self.close()
            error = f"there was no verdict after {WAIT_SECONDS:g} s: make it simpler, or try again"
            return GrammarVerdict(error=error, is_final=False)
        except (OSError, EOFError):
            code = process.wait()
            self.close()
            if code in KILLS:
                return None
            if code == -signal.SIGPROF:
                return GrammarVerdict(
                    error=f"it is too complex: compiling it takes longer than {CHECK_SECONDS:g} s"
                )
            how = signal.Signals(-code).name if code < 0 else f"code {code}"
            error = f"it is too complex: the process that tried it ended ({how})"
            return GrammarVerdict(error=error)

    def _start(self, start: GrammarCheckArgs) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "server.constrained.grammar_worker"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._process, self._end = process, weakref.finalize(self, end_process, process)
        try:
            _exchange(process, msgspec.json.encode(start), START_SECONDS)
        except (OSError, EOFError):  # TimeoutError, too
            self.close()  # a late line would be taken for the next verdict
            raise
        return process

    def close(self) -> None:
        """End the process; the next grammar starts another."""
        if self._end is not None:
            self._end()
        self._process = self._end = None


async def _in(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)


def _exchange(process: subprocess.Popen[bytes], request: bytes, seconds: float) -> bytes:
    """Send a line, and read one.  Raises TimeoutError, or EOFError if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(request + b"\n")
    process.stdin.flush()
    descriptor, line = process.stdout.fileno(), b""
    deadline = time.monotonic() + seconds
    while not line.endswith(b"\n"):
        wait_until_ready(descriptor, select.POLLIN, deadline)
        chunk = os.read(descriptor, 1 << 16)
        if not chunk:
            raise EOFError
        line += chunk
    return line


def _refusal(grammar: Grammar, verdict: GrammarVerdict) -> RequestError:
    if verdict.path is None:
        return RequestError(
            "{} cannot be used: {}",
            (FieldPath(*grammar.param), verdict.error),
            code="unsupported_schema" if grammar.schemas else "invalid_grammar",
        )
    return RequestError(
        "the schema at {} cannot be enforced: {}",
        (
            FieldPath(
                *(step[:MAX_NAME] if isinstance(step, str) else step for step in verdict.path)
            ),
            verdict.error,
        ),
        code="unsupported_schema",
    )
