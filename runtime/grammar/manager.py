"""Grammars: what constrained sequences may say next, asked of the grammar process.

The process is started by the first request that has a grammar; nobody else pays for it.  A mask for
step n + 1 is asked for as soon as the tokens of step n are known and is waited for just before
sampling, so it is made while the forward pass runs.  The wait is short: a row whose mask comes
later is left out of that step, and goes on once its mask is here.
"""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterable, Set
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec

from runtime.grammar.messages import (
    Advance,
    Advanced,
    Compile,
    Compiled,
    Free,
    FromWorker,
    GrammarProcessArgs,
    ToWorker,
)
from runtime.ipc.channel import Receiver, Sender
from runtime.messages import EngineRequest
from runtime.scheduler.batch import Masks

log = logging.getLogger("wavefill.grammar")

REPLY_TIMEOUT_SECONDS = 20.0  # for masks: the library's own limits are far below
COMPILE_SECONDS = 60.0  # for one grammar after the other, and for the process to start
STEP_WAIT_SECONDS = 0.02  # at most, for the masks of a step
LATE_WAIT_SECONDS = 0.001  # the same, while masks come later than that
DIED = "the grammar process ended"
SILENT = "the grammar process does not answer"


class Answers(NamedTuple):
    """What was heard since the last time, by request id."""

    ended: list[int]  # the grammar takes no more
    errors: dict[int, str]  # the grammar failed, and why
    lost: dict[int, str]  # the process failed
    late: set[int]  # of those that were waited for: their masks are still to come
    here: set[int]  # they were late, and need not be waited for any more


class Worker:
    """One grammar process and the channels to it."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, threads: int, parent: Path | None
    ) -> None:
        """Raises OSError or ZMQError if there can be no such process, and leaves nothing behind."""
        with ExitStack() as parts:
            folder = tempfile.mkdtemp(prefix="grammar-", dir=parent)
            parts.callback(shutil.rmtree, folder, ignore_errors=True)
            start = GrammarProcessArgs(
                tokenizer_file=str(tokenizer_file),
                vocab_size=vocab_size,
                threads=threads,
                own_address=f"ipc://{folder}/worker",
                engine_address=f"ipc://{folder}/engine",
            )
            decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
            self.receiver = Receiver(start.engine_address, decoder, low_priority=True)
            parts.callback(self.receiver.close)
            self.sender: Sender[ToWorker] = Sender(start.own_address, low_priority=True)
            parts.callback(self.sender.close)
            command = [sys.executable, "-P", "-m", "runtime.grammar.worker"]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
            parts.callback(_end, self.process)
            assert self.process.stdin is not None
            self.process.stdin.write(msgspec.json.encode(start) + b"\n")
            self.close = weakref.finalize(self, parts.pop_all().close)

    def ended(self) -> str | None:
        """How the process ended, or None."""
        code = self.process.poll()
        if code is None:
            return None
        return f"{DIED} ({signal.Signals(-code).name if code < 0 else f'code {code}'})"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


class GrammarManager:
    """Constrained sequences by request id.  The engine's thread owns it."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        *,
        threads: int = 1,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads` make masks; the process's sockets lie in `folder`, else where temporary files
        do."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._threads = threads
        self._folder = folder
        self._clock = clock
        self._worker: Worker | None = None
        self._live: set[int] = set()  # compiled and not forgotten
        self._masks: dict[int, bytes] = {}  # what may come next
        self._compiling: dict[int, EngineRequest] = {}
        self._compiled: list[tuple[EngineRequest, str | None, bool]] = []
        self._compiling_since = 0.0  # when the last one was done, or the first one began
        self._retried: set[int] = set()  # of those that compile, after a process had ended
        # Advance messages without an answer, which come in the same order: when, and for whom.
        self._asked: deque[tuple[float, list[int]]] = deque()
        self._advancing: set[int] = set()
        self._late: set[int] = set()  # of those, the ones that a step did not wait for any longer
        self._slow = False  # the last answer was one that a step had not waited for
        self._advanced = Answers([], {}, {}, set(), set())

    @property
    def compiling(self) -> bool:
        return bool(self._compiling or self._compiled)

    @property
    def live(self) -> Container[int]:
        """The requests that may run and are constrained."""
        return self._live

    @property
    def open(self) -> bool:
        """Some sequence that may run is constrained."""
        return bool(self._live)

    @property
    def late(self) -> Set[int]:
        """Those that were left out of a step and are still waited for."""
        return self._late

    def begin(self, request: EngineRequest) -> None:
        """Compile the grammar of a request; `compiled` returns the request when that is done."""
        if request.id in self._compiling or request.id in self._live:
            raise ValueError(f"request id {request.id} is in use: ids must be unique")
        if self._worker is not None and (ended := self._worker.ended()) is not None:
            self._give_up(ended)
        if not self._compiling:
            self._compiling_since = self._clock()
        self._compiling[request.id] = request
        if not self._tokenizer_file.is_file():
            self._done(request.id, f"{self._tokenizer_file.name} is missing: grammars need it")
            return
        self._compile(request)

    def _compile(self, request: EngineRequest) -> None:
        if self._worker is None:
            try:
                self._worker = self._start()
            except Exception as error:  # no room for its sockets, no process: others run on
                log.exception("there is no grammar process")
                reason = f"the grammar process cannot be started: {error}"
                self._done(request.id, reason, is_request_error=False)
                return
        params = request.params
        self._worker.sender.send(
            Compile(request.id, params.grammar, params.stop_ids, params.min_tokens)
        )

    def _start(self) -> Worker:
        return Worker(self._tokenizer_file, self._vocab_size, self._threads, self._folder)

    def compiled(self, wait_seconds: float = 0.0) -> list[tuple[EngineRequest, str | None, bool]]:
        """Requests whose grammar is ready; or why it never will be, and if it is to blame."""
        if self._compiling and not self._compiled:
            self._receive(wait_seconds)
        done, self._compiled = self._compiled, []
        return done

    def release(self, request_id: int) -> bool:
        """A request has ended or been given up.  True if `compiled` had not returned it yet."""
        was_compiling = self._compiling.pop(request_id, None) is not None
        # Its answer may have come while a step waited for masks, and nobody has asked for it yet.
        untold = [one for one in self._compiled if one[0].id != request_id]
        was_compiling = was_compiling or len(untold) < len(self._compiled)
        self._compiled = untold
        self._retried.discard(request_id)
        known = was_compiling or request_id in self._live
        self._live.discard(request_id)
        self._masks.pop(request_id, None)
        self._advancing.discard(request_id)
        self._late.discard(request_id)
        if known and self._worker is not None:
            self._worker.sender.send(Free([request_id]))
        return was_compiling

    def advance(self, tokens: list[tuple[int, int]]) -> None:
        """Tokens that were committed: (request id, token), for any requests."""
        mine = [(id, token) for id, token in tokens if id in self._masks]
        if not mine:
            return
        for id, _ in mine:
            del self._masks[id]
            self._advancing.add(id)
        assert self._worker is not None
        self._worker.sender.send(Advance(mine))
        self._asked.append((self._clock(), [id for id, _ in mine]))

    def wait_advanced(self, ids: Iterable[int] = ()) -> Answers:
        """Hear what came of `advance`.  Waits for what concerns `ids`, but only a moment."""
        until = self._clock() + (LATE_WAIT_SECONDS if self._slow else STEP_WAIT_SECONDS)
        self._receive(0.0)
        late = self._advancing.intersection(ids)
        while late and (left := until - self._clock()) > 0:
            self._receive(max(left, 0.001))  # the least that a receiver can wait
            late &= self._advancing
        if late:
            self._late |= late
            self._slow = True
        advanced, self._advanced = self._advanced, Answers([], {}, {}, set(), set())
        return advanced._replace(late=late)

    def masks(self, rows: Iterable[tuple[int, int]]) -> Masks | None:
        """The masks of some rows of a batch, given as (row, request id); None if none has one."""
        found = [(row, mask) for row, id in rows if (mask := self._masks.get(id)) is not None]
        if not found:
            return None
        return Masks([row for row, _ in found], b"".join([mask for _, mask in found]))

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def _receive(self, wait_seconds: float) -> None:
        worker = self._worker
        if worker is None:
            return
        messages = worker.receiver.receive(wait_seconds)
        for message in messages:
            if isinstance(message, Compiled):
                is_request_error = not message.internal
                self._done(
                    message.key, message.error, message.mask, is_request_error=is_request_error
                )
            else:
                self._take(message)
        if not messages:
            ended = worker.ended()
            if ended is not None or self._overdue():
                self._give_up(ended or SILENT)

    def _overdue(self) -> bool:
        now = self._clock()
        masks = bool(self._asked) and now - self._asked[0][0] > REPLY_TIMEOUT_SECONDS
        return masks or (bool(self._compiling) and now - self._compiling_since > COMPILE_SECONDS)

    def _done(
        self, id: int, error: str | None, mask: bytes = b"", *, is_request_error: bool = True
    ) -> None:
        self._compiling_since = self._clock()
        request = self._compiling.pop(id, None)
        self._retried.discard(id)
        if request is None:
            return  # it was given up
        if error is None:
            self._live.add(id)
            self._masks[id] = mask
        self._compiled.append((request, error, is_request_error))

    def _take(self, advanced: Advanced) -> None:
        when, ids = self._asked.popleft()
        waited, late = self._advancing, self._late.intersection(ids)
        self._masks.update({id: mask for id, mask in advanced.masks.items() if id in waited})
        self._advanced.ended.extend(id for id in advanced.ended if id in waited)
        self._advanced.errors.update({id: e for id, e in advanced.errors.items() if id in waited})
        self._advanced.here.update(late)
        self._slow = bool(late) and self._clock() - when > STEP_WAIT_SECONDS
        self._late -= late
        waited.difference_update(ids)

    def _give_up(self, reason: str) -> None:
        """The process is of no more use: whoever relied on it fails, the next one starts anew."""
        log.error("%s: %d constrained requests end", reason, len(self._live))
        self.close()
        again: list[EngineRequest] = []
        for id, request in list(self._compiling.items()):
            if id in self._retried:
                self._done(id, reason)  # it may be the one to blame
            else:
                self._retried.add(id)
                again.append(request)
        self._advanced.lost.update(dict.fromkeys(self._live, reason))
        self._masks.clear()
        self._asked.clear()
        self._advancing.clear()
        self._late.clear()
        self._slow = False
        self._compiling_since = self._clock()
        for request in again:
            self._compile(request)
