"""EngineClient: what an API process uses to reach the engines, and a Mailbox per request.

One message a step arrives, and a callback distributes its outputs to the mailboxes.  A reader with
a callback of its own (Mailbox.drain) is called at once; no task has to wake for a token.  For other
readers a mailbox holds at most one output: what arrives while the reader is busy is merged into it,
so a slow reader delays no other.  Nor do steps queue up where this process is the slow one: those
that have arrived together are merged before delivery.

There may be several engines, each with the whole model: a router chooses one for each request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from runtime.ipc.channel import Sender
from runtime.ipc.connection import EngineAddress, EngineConnection, Listener
from runtime.ipc.mailbox import Mailbox
from runtime.messages import (
    BACKGROUND,
    Abort,
    EngineDown,
    EngineLoad,
    EngineRequest,
    EngineRequests,
    FromEngine,
    Observe,
    Progress,
    PromptImage,
    Ready,
    RequestOutput,
    SamplingParams,
)
from runtime.routing.engine_sums import ready_of_all, stats_of_all
from runtime.routing.router import Router
from runtime.snapshot import Snapshot
from runtime.stats import Stats

CLIENT_BITS = 40  # a request id is the API process's index, then a counter of this many bits
# Engines that may end while one request waits for its first output in them: it may be what ends
# them.  An engine that is started again is another one.
MAX_ENGINES_LOST = 2


class EngineClient:
    """Submits requests to the engines and delivers their outputs.  Belongs to one event loop.

    While no engine is ready, requests wait here; they are sent when one is.
    """

    def __init__(
        self,
        index: int,
        addresses: Sequence[EngineAddress],
        *,
        stall_seconds: float = 30.0,
    ) -> None:
        self.index = index
        # Called with the engine's index.
        self.on_snapshot: Callable[[int, Snapshot], None] | None = None
        listener = Listener(
            self._deliver, self._on_ready, self._on_engine_down, self._on_load, self._on_snapshot
        )
        self.engines = [
            EngineConnection(number, address, stall_seconds, listener)
            for number, address in enumerate(addresses)
        ]
        self._router = Router(len(self.engines))
        self._mailboxes: dict[int, Mailbox] = {}
        self._num_background = 0  # of these
        # Ids start at the clock, so that a restarted API process does not reuse any.
        self._next_id = (index << CLIENT_BITS) + int(time.time() * 1000) % (1 << CLIENT_BITS)
        self._ready: Ready | None = None
        self._closed = False
        # Within sent_together(): requests that are to be sent, by engine.
        self._together: dict[int, list[EngineRequest]] | None = None

    async def start(self) -> None:
        """Listen from now on, on the running event loop."""
        for engine in self.engines:
            engine.start(self.index)

    def close(self) -> None:
        """Stop listening; open requests end with an error."""
        for engine in self.engines:
            engine.close()
        self._closed = True
        for mailbox in self._mailboxes.values():
            _stop(mailbox)
        self._mailboxes.clear()
        self._num_background = 0

    @property
    def pending(self) -> int:
        """Unfinished requests, background ones not counted."""
        return len(self._mailboxes) - self._num_background

    # The engines together.

    @property
    def ready(self) -> Ready | None:
        """What those that are ready have together; None if none is.  The same object until one
        starts or ends."""
        return self._ready

    @property
    def progress(self) -> Progress | None:
        """Of the first engine that loads, while none is ready."""
        if self._ready is not None and len(self.engines) > 1:
            return None
        return next((each.progress for each in self.engines if each.progress is not None), None)

    @property
    def down(self) -> str | None:
        """Why no engine serves, if one has ended."""
        if self._ready is not None:
            return None
        return next((each.down for each in self.engines if each.down is not None), None)

    @property
    def stats(self) -> Stats:
        return stats_of_all([engine.stats for engine in self.engines])

    def unhealthy(self) -> str | None:
        """Why no engine serves, or None; None during the first start, too."""
        if self.down is not None:
            return self.down
        ready = [engine for engine in self.engines if engine.ready is not None]
        silent = [engine.stalled() for engine in ready]
        if not silent or min(silent) == 0.0:
            return None
        return (
            f"the engine has been silent for {min(silent):.0f} s, requests pending: {self.pending}"
        )

    # Requests.

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes = b"",
        images: tuple[PromptImage, ...] = (),
        generation_prompt_len: int = 0,
    ) -> Mailbox:
        """Queue a request; never blocks."""
        request = EngineRequest(
            self._new_id(),
            self.index,
            tokens,
            params,
            priority,
            salt,
            arrived=time.monotonic(),
            images=images,
            generation_prompt_len=generation_prompt_len,
        )
        mailbox = Mailbox(request)
        if self._closed:
            _stop(mailbox)
            return mailbox
        self._mailboxes[request.id] = mailbox
        self._num_background += priority == BACKGROUND
        self._route(mailbox)
        return mailbox

    @contextmanager
    def sent_together(self) -> Generator[None]:
        """Requests with the same images that are submitted within it go in one message, at its end,
        to each engine that is to answer some of them."""
        assert self._together is None
        self._together = {}
        try:
            yield
        finally:
            groups, self._together = self._together, None
            for engine, requests in groups.items():
                if len(requests) > 1:
                    self.engines[engine].send(EngineRequests.of(requests))
                else:
                    self.engines[engine].send(requests[0])

    def _route(self, mailbox: Mailbox) -> None:
        """Send a request to an engine; it waits if none is ready."""
        ready = [engine for engine in self.engines if engine.ready is not None]
        if ready:
            answering = [each.index for each in ready if not each.stalled()]
            among = answering or [each.index for each in ready]
            mailbox.engine = self._router.choose(mailbox.request, among)
            if self._together is None:
                self.engines[mailbox.engine].send(mailbox.request)
            else:
                self._together.setdefault(mailbox.engine, []).append(mailbox.request)

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def abort(self, id: int) -> None:
        """Abort a request.  Unless it has finished, its mailbox gets an output with "abort"."""
        mailbox = self._mailboxes.get(id)
        if mailbox is None or mailbox.aborted:
            return
        mailbox.aborted = True
        if mailbox.engine is not None:
            self.engines[mailbox.engine].send(Abort(id))
        else:
            self._finish(mailbox, RequestOutput(id, [], finish="abort"))

    def observe(self, share: bytes, *, watching: bool, engine: int = 0) -> None:
        """See Observe.  `on_snapshot` is called with the snapshot that it asks for."""
        if self.engines[engine].ready is not None:
            self.engines[engine].send(Observe(self.index, watching, share))

    def _finish(self, mailbox: Mailbox, output: RequestOutput) -> None:
        self._forget(mailbox)
        mailbox.put(output)

    def _forget(self, mailbox: Mailbox) -> None:
        del self._mailboxes[mailbox.id]
        self._num_background -= mailbox.request.priority == BACKGROUND

    # What the engines say.

    def _deliver(self, output: RequestOutput) -> None:
        mailbox = self._mailboxes.get(output.id)
        if mailbox is not None:
            if output.finish is not None:
                self._forget(mailbox)
            mailbox.put(output)

    def _on_load(self, engine: int, load: EngineLoad) -> None:
        self._router.engines[engine].report(load)

    def _on_snapshot(self, engine: int, snapshot: Snapshot) -> None:
        if self.on_snapshot is not None:
            self.on_snapshot(engine, snapshot)

    def _update_ready(self, engine: int) -> None:
        self._router.engines[engine].start(self.engines[engine].ready)
        self._ready = ready_of_all([each.ready for each in self.engines])

    def _on_ready(self, engine: int) -> None:
        self._update_ready(engine)
        for mailbox in self._mailboxes.values():
            if mailbox.engine is None:
                self._route(mailbox)

    def _on_engine_down(self, engine: int, reason: str) -> None:
        self._update_ready(engine)
        for mailbox in list(self._mailboxes.values()):
            if mailbox.engine != engine:
                continue
            mailbox.engines_lost += 1
            if mailbox.aborted:
                self._finish(mailbox, RequestOutput(mailbox.id, [], finish="abort"))
            elif mailbox.delivered or mailbox.request.priority == BACKGROUND:
                self._finish(mailbox, _failed(mailbox.id, reason))  # lines of batches run alone
            elif mailbox.engines_lost >= MAX_ENGINES_LOST:
                self._finish(mailbox, _failed(mailbox.id, _given_up(reason)))
            else:
                # A new id, because a late output of the engine that died has the old one.
                del self._mailboxes[mailbox.id]
                mailbox.reset(self._new_id())
                self._mailboxes[mailbox.id] = mailbox
                self._route(mailbox)


def _failed(id: int, reason: str) -> RequestOutput:
    return RequestOutput(id, [], finish="error", error=reason)


def _stop(mailbox: Mailbox) -> None:
    mailbox.stopped = True
    reason = "the server is shutting down: send the request to another one"
    mailbox.put(_failed(mailbox.id, reason))


def _given_up(reason: str) -> str:
    return (
        f"{reason}; {MAX_ENGINES_LOST} engines have ended under this request, which may be the "
        "cause, so it is not run again"
    )


class ClientNotifier:
    """Tells every API process what an engine cannot: that it ended, or what goes before it."""

    def __init__(self, addresses: list[str]) -> None:
        self._senders: list[Sender[FromEngine]] = [Sender(address) for address in addresses]

    def engine_down(self, reason: str, epoch: int) -> None:
        """Send EngineDown; `epoch` is that of the engine that ended."""
        for sender in self._senders:
            sender.send(EngineDown(reason, epoch))

    def progress(self, progress: Progress) -> None:
        for sender in self._senders:
            sender.send(progress)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
