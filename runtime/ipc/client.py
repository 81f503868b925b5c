"""EngineClient: what an API process uses to reach the engine process, and a Mailbox per request.

One message a step arrives and is spread over the mailboxes by a callback.  A reader that can take
Outputs as they come is called at once; no task has to wake for a token.  For the others a mailbox
holds at most one Output: what arrives while its reader is busy is merged into it, so a slow reader
costs its own tokens and nothing else.  Nor do steps queue up where this process is the slow one:
those that have arrived together are told together.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator

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
    Progress,
    Ready,
    RequestOutput,
    SamplingParams,
    Stats,
    StepOutput,
    ToEngine,
)

CLIENT_BITS = 40  # a request id is the API process's index, then a counter of this many bits


class EngineClient:
    """Submits requests to the engine and hands its outputs out.  Lives on one event loop.

    While the engine loads or restarts, requests wait here and are sent when it is ready.
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
        self._own_address = own_address
        self._stall_seconds = stall_seconds
        self._sender: Sender[ToEngine] = Sender(address_of_engine)
        self._receiver: AsyncReceiver[FromEngine] | None = None
        self._open: dict[int, Mailbox] = {}
        self._num_background = 0  # of those
        # Counting from the clock keeps the ids of an API process that was restarted apart.
        self._next_id = (index << CLIENT_BITS) + int(time.time() * 1000) % (1 << CLIENT_BITS)
        self._heard = time.monotonic()
        self._steps: list[StepOutput] = []  # that have come and were not told yet

    async def start(self) -> None:
        """Listen from now on, on the running event loop."""
        decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._heard = time.monotonic()
        self._receiver = AsyncReceiver(self._own_address, decoder, self._handle, self._tell)
        self._sender.send(Hello(self.index))

    def close(self) -> None:
        """Stop listening; open requests end with an error."""
        if self._receiver is not None:
            self._receiver.close()
        self._sender.close()
        for mailbox in self._open.values():
            mailbox.put(_failed(mailbox.id, "the server is shutting down"))
        self._open.clear()
        self._num_background = 0

    @property
    def pending(self) -> int:
        """Requests that have not ended, those in the background left out."""
        return len(self._open) - self._num_background

    def unhealthy(self) -> str | None:
        """Why the engine does not serve, or None.  Still loading for the first time is no fault."""
        if self.down is not None:
            return self.down
        silent = time.monotonic() - self._heard
        # The engine speaks once a second when idle, and between two steps when not; a large model
        # on a CPU takes long ones.
        timeout = max(self._stall_seconds, 5 * self.stats.step_seconds)
        if self.ready is not None and silent > timeout:
            return (
                f"the engine has been silent for {silent:.0f} s, requests pending: {self.pending}"
            )
        return None

    def submit(
        self, tokens: list[int], params: SamplingParams, *, priority: int = 0, salt: bytes = b""
    ) -> Mailbox:
        """Queue a request; never blocks."""
        arrived = time.monotonic()
        request = EngineRequest(self._new_id(), self.index, tokens, params, priority, salt, arrived)
        mailbox = self._open[request.id] = Mailbox(request)
        self._num_background += priority == BACKGROUND
        if self.ready is not None:
            self._sender.send(request)
        return mailbox

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def abort(self, id: int) -> None:
        """Give a request up.  Its mailbox gets an Output that says "abort" unless it has ended."""
        mailbox = self._open.get(id)
        if mailbox is None or mailbox.aborted:
            return
        mailbox.aborted = True
        if self.ready is not None:
            self._sender.send(Abort(id))
        else:
            self._end(mailbox, RequestOutput(id, [], finish="abort"))

    def _end(self, mailbox: Mailbox, output: RequestOutput) -> None:
        self._forget(mailbox)
        mailbox.put(output)

    def _forget(self, mailbox: Mailbox) -> None:
        del self._open[mailbox.id]
        self._num_background -= mailbox.request.priority == BACKGROUND

    def _handle(self, message: FromEngine) -> None:
        self._heard = time.monotonic()
        if isinstance(message, StepOutput):
            self._steps.append(message)
            return
        self._tell()
        match message:
            case Progress():
                self.progress = message
            case Ready():
                self._begin(message)
            case EngineDown():
                known = self.ready.epoch if self.ready is not None else 0
                if message.epoch is None or message.epoch >= known:
                    self._engine_died(message.reason)

    def _tell(self) -> None:
        """Hand out what the steps that have come made."""
        steps, self._steps = self._steps, []
        if not steps or self.ready is None:
            return  # a late word of an engine that died: its requests start over or have ended
        self.stats = steps[-1].stats
        if len(steps) == 1:
            for output in _outputs_of(steps[0]):
                self._deliver(output)
            return
        together: dict[int, RequestOutput] = {}
        for step in steps:
            for output in _outputs_of(step):
                before = together.get(output.id)
                together[output.id] = output if before is None else merged(before, output)
        for output in together.values():
            self._deliver(output)

    def _deliver(self, output: RequestOutput) -> None:
        mailbox = self._open.get(output.id)
        if mailbox is not None:
            if output.finish is not None:
                self._forget(mailbox)
            mailbox.put(output)

    def _begin(self, ready: Ready) -> None:
        if self.ready is not None:
            if self.ready.epoch == ready.epoch:
                return
            # The engine was restarted, and the launcher's word about it was overtaken.
            self._engine_died("the engine was restarted")
        self.ready = ready
        self.down = None
        self.progress = None
        for mailbox in self._open.values():
            self._sender.send(mailbox.request)

    def _engine_died(self, reason: str) -> None:
        self.ready = None
        self.progress = None
        self.down = reason
        self.stats = Stats()
        self._sender.reopen()
        for mailbox in list(self._open.values()):
            if mailbox.aborted:
                self._end(mailbox, RequestOutput(mailbox.id, [], finish="abort"))
            elif mailbox.delivered:
                self._end(mailbox, _failed(mailbox.id, reason))
            else:
                # Under its old id, a late output of the engine that died could still find it.
                del self._open[mailbox.id]
                mailbox.reset(self._new_id())
                self._open[mailbox.id] = mailbox


def _outputs_of(step: StepOutput) -> Iterator[RequestOutput]:
    for id, token in zip(array("q", step.ids), array("i", step.tokens), strict=True):
        yield RequestOutput(id, [token])
    yield from step.outputs


def _failed(id: int, reason: str) -> RequestOutput:
    return RequestOutput(id, [], finish="error", error=reason)


class ClientNotifier:
    """How the launcher tells every API process that the engine process ended."""

    def __init__(self, addresses: list[str]) -> None:
        self._senders: list[Sender[FromEngine]] = [Sender(address) for address in addresses]

    def engine_down(self, reason: str, epoch: int) -> None:
        """`epoch` is that of the engine that ended."""
        for sender in self._senders:
            sender.send(EngineDown(reason, epoch))

    def close(self) -> None:
        for sender in self._senders:
            sender.close()
