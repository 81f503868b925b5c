"""EngineClient: what an API process uses to reach the engine process, and a Mailbox per request.

One message a step arrives, and a callback distributes its outputs to the mailboxes.  A reader with
a callback of its own (Mailbox.drain) is called at once; no task has to wake for a token.  For other
readers a mailbox holds at most one output: what arrives while the reader is busy is merged into it,
so a slow reader delays no other.  Nor do steps queue up where this process is the slow one: those
that have arrived together are merged before delivery.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator

import msgspec

from runtime.ipc.channel import AsyncReceiver, Sender
from runtime.ipc.mailbox import Mailbox, merged
from runtime.messages import (
    BACKGROUND,
    Abort,
    EngineDown,
    EngineRequest,
    FromEngine,
    Hello,
    Observe,
    Progress,
    PromptImage,
    Ready,
    RequestOutput,
    SamplingParams,
    Snapshot,
    Stats,
    StepOutput,
    ToEngine,
)

CLIENT_BITS = 40  # a request id is the API process's index, then a counter of this many bits


class EngineClient:
    """Submits requests to the engine and delivers its outputs.  Belongs to one event loop.

    While the engine loads or restarts, requests wait here; they are sent when it is ready.
    """

    def __init__(
        self,
        index: int,
        address_of_engine: str,
        own_address: str,
        *,
        stall_seconds: float = 30.0,
    ) -> None:
        self.index = index
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.down: str | None = None
        self.stats = Stats()
        self.on_snapshot: Callable[[Snapshot], None] | None = None
        self._own_address = own_address
        self._stall_seconds = stall_seconds
        self._sender: Sender[ToEngine] = Sender(address_of_engine)
        self._receiver: AsyncReceiver[FromEngine] | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        self._num_background = 0  # of these
        # Ids start at the clock, so that a restarted API process does not reuse any.
        self._next_id = (index << CLIENT_BITS) + int(time.time() * 1000) % (1 << CLIENT_BITS)
        self._last_message_at = time.monotonic()
        self._undelivered_steps: list[StepOutput] = []  # received since the last delivery

    async def start(self) -> None:
        """Listen from now on, on the running event loop."""
        decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._receiver = AsyncReceiver(
            self._own_address, decoder, self._handle, self._deliver_steps
        )
        self._sender.send(Hello(self.index))

    def close(self) -> None:
        """Stop listening; open requests end with an error."""
        if self._receiver is not None:
            self._receiver.close()
        self._sender.close()
        for mailbox in self._mailboxes.values():
            mailbox.put(_failed(mailbox.id, "the server is shutting down"))
        self._mailboxes.clear()
        self._num_background = 0

    @property
    def pending(self) -> int:
        """Unfinished requests, background ones not counted."""
        return len(self._mailboxes) - self._num_background

    def unhealthy(self) -> str | None:
        """Why the engine does not serve, or None; None during its first start, too."""
        if self.down is not None:
            return self.down
        silent = time.monotonic() - self._last_message_at
        # The engine sends a message once a second when idle, else after every step; a large model
        # on a CPU has long steps.
        timeout = max(self._stall_seconds, 5 * self.stats.step_seconds)
        if self.ready is not None and silent > timeout:
            return (
                f"the engine has been silent for {silent:.0f} s, requests pending: {self.pending}"
            )
        return None

    def submit(
        self,
        tokens: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        salt: bytes = b"",
        images: tuple[PromptImage, ...] = (),
    ) -> Mailbox:
        """Queue a request; never blocks."""
        arrived = time.monotonic()
        request = EngineRequest(
            self._new_id(), self.index, tokens, params, priority, salt, arrived, images
        )
        mailbox = self._mailboxes[request.id] = Mailbox(request)
        self._num_background += priority == BACKGROUND
        if self.ready is not None:
            self._sender.send(request)
        return mailbox

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def abort(self, id: int) -> None:
        """Abort a request.  Unless it has finished, its mailbox gets an output with "abort"."""
        mailbox = self._mailboxes.get(id)
        if mailbox is None or mailbox.aborted:
            return
        mailbox.aborted = True
        if self.ready is not None:
            self._sender.send(Abort(id))
        else:
            self._finish(mailbox, RequestOutput(id, [], finish="abort"))

    def observe(self, share: bytes, *, watching: bool) -> None:
        """See Observe.  `on_snapshot` is called with the snapshot that it asks for."""
        if self.ready is not None:
            self._sender.send(Observe(self.index, watching, share))

    def _finish(self, mailbox: Mailbox, output: RequestOutput) -> None:
        self._forget(mailbox)
        mailbox.put(output)

    def _forget(self, mailbox: Mailbox) -> None:
        del self._mailboxes[mailbox.id]
        self._num_background -= mailbox.request.priority == BACKGROUND

    def _handle(self, message: FromEngine) -> None:
        self._last_message_at = time.monotonic()
        if isinstance(message, StepOutput):
            self._undelivered_steps.append(message)
            return
        self._deliver_steps()
        match message:
            case Progress():
                self.progress = message
            case Snapshot():
                if self.on_snapshot is not None and self.ready is not None:
                    self.on_snapshot(message)
            case Ready():
                self._on_ready(message)
            case EngineDown():
                known = self.ready.epoch if self.ready is not None else 0
                if message.epoch is None or message.epoch >= known:
                    self._on_engine_down(message.reason)

    def _deliver_steps(self) -> None:
        """Deliver the outputs of all steps received since the last delivery."""
        steps, self._undelivered_steps = self._undelivered_steps, []
        if not steps or self.ready is None:
            return  # from an engine that died: its requests were submitted again or have ended
        self.stats = steps[-1].stats
        if len(steps) == 1:
            for output in _outputs_of(steps[0]):
                self._deliver(output)
            return
        merged_outputs: dict[int, RequestOutput] = {}
        for step in steps:
            for output in _outputs_of(step):
                earlier = merged_outputs.get(output.id)
                merged_outputs[output.id] = output if earlier is None else merged(earlier, output)
        for output in merged_outputs.values():
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        mailbox = self._mailboxes.get(output.id)
        if mailbox is not None:
            if output.finish is not None:
                self._forget(mailbox)
            mailbox.put(output)

    def _on_ready(self, ready: Ready) -> None:
        if self.ready is not None:
            if self.ready.epoch == ready.epoch:
                return
            # The engine was restarted, and this message overtook the launcher's EngineDown.
            self._on_engine_down("the engine was restarted")
        self.ready = ready
        self.down = None
        self.progress = None
        for mailbox in self._mailboxes.values():
            self._sender.send(mailbox.request)

    def _on_engine_down(self, reason: str) -> None:
        self.ready = None
        self.progress = None
        self.down = reason
        self.stats = Stats()
        self._sender.reopen()
        for mailbox in list(self._mailboxes.values()):
            if mailbox.aborted:
                self._finish(mailbox, RequestOutput(mailbox.id, [], finish="abort"))
            elif mailbox.delivered:
                self._finish(mailbox, _failed(mailbox.id, reason))
            else:
                # A new id, because a late output of the engine that died has the old one.
                del self._mailboxes[mailbox.id]
                mailbox.reset(self._new_id())
                self._mailboxes[mailbox.id] = mailbox


def _outputs_of(step: StepOutput) -> Iterator[RequestOutput]:
    for id, token in zip(array("q", step.ids), array("i", step.tokens), strict=True):
        yield RequestOutput(id, [token])
    yield from step.outputs


def _failed(id: int, reason: str) -> RequestOutput:
    return RequestOutput(id, [], finish="error", error=reason)


class ClientNotifier:
    """Tells every API process what the engine cannot: that it ended, or what goes before it."""

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
