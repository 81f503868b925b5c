"""GrammarManager: the masks of constrained sequences, computed by the grammar process.

The first request with a grammar starts the process; without one there is none.  The mask of step
n + 1 is requested as soon as the tokens of step n are known, and waited for just before sampling,
so it is computed during the forward pass.  The wait is short: a row whose mask comes later is left
out of that step, and resumes once its mask has arrived.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec

from runtime.grammar.messages import (
    Advance,
    Advanced,
    Compile,
    Compiled,
    Free,
    FromGrammarProcess,
    GrammarProcessArgs,
    ToGrammarProcess,
)
from runtime.ipc.channel import Receiver, Sender
from runtime.messages import EngineRequest
from runtime.scheduler.batch import Masks

log = logging.getLogger("wavefill.grammar")

REPLY_TIMEOUT_SECONDS = 20.0  # for masks: the limits of the grammar library are far below
COMPILE_SECONDS = 60.0  # for each grammar in turn, and for the process to start
STEP_WAIT_SECONDS = 0.02  # at most, for the masks of a step
LATE_WAIT_SECONDS = 0.001  # likewise, for rows whose last mask took longer than that
DIED = "the grammar process ended"
SILENT = "the grammar process does not answer"


class GrammarUpdates(NamedTuple):
    """What the grammar process reported since the last poll, by request id."""

    ended: list[int]  # the grammar allows no further token
    errors: dict[int, str]  # the grammar failed, and why
    lost: dict[int, str]  # the process failed
    late: set[int]  # of the ids polled for: their masks have not arrived
    arrived: set[int]  # late ones that have been answered since


class GrammarProcess:
    """One grammar process and the channels to it."""

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, threads: int, parent: Path | None
    ) -> None:
        """Raises OSError or ZMQError if the process cannot start, with all resources released."""
        with ExitStack() as resources:
            folder = resources.enter_context(
                TemporaryDirectory(prefix="grammar-", dir=parent, ignore_cleanup_errors=True)
            )
            args = GrammarProcessArgs(
                tokenizer_file=str(tokenizer_file),
                vocab_size=vocab_size,
                threads=threads,
                own_address=f"ipc://{folder}/worker",
                engine_address=f"ipc://{folder}/engine",
            )
            decoder: msgspec.msgpack.Decoder[FromGrammarProcess] = msgspec.msgpack.Decoder(
                FromGrammarProcess
            )
            self.receiver = Receiver(args.engine_address, decoder, low_priority=True)
            resources.callback(self.receiver.close)
            self.sender: Sender[ToGrammarProcess] = Sender(args.own_address, low_priority=True)
            resources.callback(self.sender.close)
            command = [sys.executable, "-P", "-m", "runtime.grammar.worker"]
            self.popen = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
            resources.enter_context(self.popen)
            resources.callback(self.popen.kill)
            assert self.popen.stdin is not None
            self.popen.stdin.write(msgspec.json.encode(args) + b"\n")
            self.close = weakref.finalize(self, resources.pop_all().close)

    def ended(self) -> str | None:
        """How the process ended, or None."""
        code = self.popen.poll()
        if code is None:
            return None
        return f"{DIED} ({signal.Signals(-code).name if code < 0 else f'code {code}'})"


class GrammarManager:
    """Constrained sequences by request id.  Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        tokenizer_file: Path,
        vocab_size: int,
        *,
        threads: int = 1,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads` of the process compute masks; its sockets are in `folder`, by default that of
        temporary files."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._threads = threads
        self._folder = folder
        self._clock = clock
        self._process: GrammarProcess | None = None
        self.live: set[int] = set()  # requests whose grammar is compiled, until released
        self._masks: dict[int, bytes] = {}  # of the next token
        self._compiling: dict[int, EngineRequest] = {}
        self._compiled: list[tuple[EngineRequest, str | None, bool]] = []
        self._compiling_since = 0.0  # when the last grammar was done, or the first one submitted
        self._retried: set[int] = set()  # of _compiling: submitted again after a process failure
        # Ids whose tokens were sent and not answered, and when they were; the first is the oldest.
        self._advancing: dict[int, float] = {}
        self.late: set[int] = set()  # of these, the ones that were left out of a step
        self._often_late: set[int] = set()  # whose last answer came after a step had waited for it
        self._advanced = GrammarUpdates([], {}, {}, set(), set())

    @property
    def compiling(self) -> bool:
        return bool(self._compiling or self._compiled)

    def submit(self, request: EngineRequest) -> None:
        """Compile the grammar of a request; `take_compiled` returns the request when done."""
        if request.id in self._compiling or request.id in self.live:
            raise ValueError(f"request id {request.id} is in use: ids must be unique")
        if self._process is not None and (ended := self._process.ended()) is not None:
            self._on_process_failure(ended)
        if not self._compiling:
            self._compiling_since = self._clock()
        self._compiling[request.id] = request
        if not self._tokenizer_file.is_file():
            error = f"{self._tokenizer_file.name} is missing: grammars need it"
            self._finish_compile(Compiled(request.id, error=error))
        else:
            self._compile(request)

    def _compile(self, request: EngineRequest) -> None:
        if self._process is None:
            try:
                self._process = self._start()
            except Exception as error:  # no space for its sockets, no process: other requests run
                log.exception("there is no grammar process")
                reason = f"the grammar process cannot be started: {error}"
                self._finish_compile(Compiled(request.id, error=reason, internal=True))
                return
        params = request.params
        self._process.sender.send(
            Compile(request.id, params.grammar, params.stop_ids, params.min_tokens)
        )

    def _start(self) -> GrammarProcess:
        return GrammarProcess(self._tokenizer_file, self._vocab_size, self._threads, self._folder)

    def take_compiled(
        self, wait_seconds: float = 0.0
    ) -> list[tuple[EngineRequest, str | None, bool]]:
        """(request, error, is_request_error) of the requests whose compilation has ended."""
        if self._compiling and not self._compiled:
            self._receive(wait_seconds)
        done, self._compiled = self._compiled, []
        return done

    def release(self, request_id: int) -> bool:
        """Forget a request, finished or aborted.  True if `take_compiled` has not returned it."""
        was_compiling = self._compiling.pop(request_id, None) is not None
        # Its answer may have arrived while a step waited for masks.
        remaining = [one for one in self._compiled if one[0].id != request_id]
        was_compiling = was_compiling or len(remaining) < len(self._compiled)
        self._compiled = remaining
        self._retried.discard(request_id)
        known = was_compiling or request_id in self.live
        self.live.discard(request_id)
        self._masks.pop(request_id, None)
        self._advancing.pop(request_id, None)
        self.late.discard(request_id)
        self._often_late.discard(request_id)
        if known and self._process is not None:
            self._process.sender.send(Free(request_id))
        return was_compiling

    def advance(self, tokens: list[tuple[int, list[int]]]) -> None:
        """Advance the grammars by committed tokens: (request id, tokens); others are ignored."""
        own = [(id, committed) for id, committed in tokens if id in self._masks]
        if not own:
            return
        now = self._clock()
        for id, _ in own:
            del self._masks[id]
            self._advancing[id] = now
        assert self._process is not None
        self._process.sender.send(Advance(own))

    def poll(self, ids: Iterable[int] = ()) -> GrammarUpdates:
        """The updates since the last poll; waits up to STEP_WAIT_SECONDS for the masks of `ids`."""
        began = self._clock()
        self._receive(0.0)
        late = self._advancing.keys() & ids
        while late:
            seconds = STEP_WAIT_SECONDS if late - self._often_late else LATE_WAIT_SECONDS
            remaining = began + seconds - self._clock()
            if remaining <= 0:
                break
            self._receive(max(remaining, 0.001))  # a receiver waits whole milliseconds
            late &= self._advancing.keys()
        self.late |= late
        self._often_late |= late
        advanced, self._advanced = self._advanced, GrammarUpdates([], {}, {}, set(), set())
        return advanced._replace(late=late)

    def masks(self, rows: Iterable[tuple[int, int]]) -> Masks | None:
        """The masks of rows of a batch, given as (row, request id); None if no row has one."""
        found = [(row, mask) for row, id in rows if (mask := self._masks.get(id)) is not None]
        if not found:
            return None
        return Masks([row for row, _ in found], b"".join([mask for _, mask in found]))

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def _receive(self, wait_seconds: float) -> None:
        process = self._process
        if process is None:
            return
        messages = process.receiver.receive(wait_seconds)
        for message in messages:
            if isinstance(message, Compiled):
                self._finish_compile(message)
            else:
                self._on_advanced(message)
        if not messages:
            ended = process.ended()
            if ended is not None or self._overdue():
                self._on_process_failure(ended or SILENT)

    def _overdue(self) -> bool:
        now = self._clock()
        if now - next(iter(self._advancing.values()), now) > REPLY_TIMEOUT_SECONDS:
            return True
        return bool(self._compiling) and now - self._compiling_since > COMPILE_SECONDS

    def _finish_compile(self, compiled: Compiled) -> None:
        self._compiling_since = self._clock()
        request = self._compiling.pop(compiled.key, None)
        self._retried.discard(compiled.key)
        if request is None:
            return  # released meanwhile
        if compiled.error is None:
            self.live.add(compiled.key)
            self._masks[compiled.key] = compiled.mask
        self._compiled.append((request, compiled.error, not compiled.internal))

    def _on_advanced(self, advanced: Advanced) -> None:
        now, updates = self._clock(), self._advanced
        for id in (*advanced.masks, *advanced.ended, *advanced.errors):
            sent_at = self._advancing.pop(id, None)
            if sent_at is None:
                continue  # released meanwhile
            if id in advanced.masks:
                self._masks[id] = advanced.masks[id]
            elif id in advanced.errors:
                updates.errors[id] = advanced.errors[id]
            else:
                updates.ended.append(id)
            if id in self.late:
                self.late.remove(id)
                updates.arrived.add(id)
            if now - sent_at <= STEP_WAIT_SECONDS:
                self._often_late.discard(id)

    def _on_process_failure(self, reason: str) -> None:
        """End the process: its live requests fail; those that compile start another process."""
        log.error("%s: %d constrained requests end", reason, len(self.live))
        self.close()
        retries: list[EngineRequest] = []
        for id, request in list(self._compiling.items()):
            if id in self._retried:
                self._finish_compile(Compiled(id, error=reason))  # it may be the cause
            else:
                self._retried.add(id)
                retries.append(request)
        self._advanced.lost.update(dict.fromkeys(self.live, reason))
        self._masks.clear()
        self._advancing.clear()
        self.late.clear()
        self._often_late.clear()
        self._compiling_since = self._clock()
        for request in retries:
            self._compile(request)
