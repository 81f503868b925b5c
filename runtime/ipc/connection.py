"""EngineConnection: one engine, as an API process sees it."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from runtime.ipc.channel import AsyncReceiver, Sender
from runtime.ipc.mailbox import merged
from runtime.messages import (
    EngineDown,
    EngineLoad,
    FromEngine,
    Hello,
    Progress,
    Ready,
    RequestOutput,
    StepOutput,
    ToEngine,
)
from runtime.snapshot import Snapshot
from runtime.stats import Stats


class EngineAddress(NamedTuple):
    """Where an engine receives, and where this API process receives from it."""

    engine: str
    own: str


class Listener(NamedTuple):
    """What is called with each message of an engine; the first argument is the engine's index."""

    output: Callable[[RequestOutput], None]
    ready: Callable[[int], None]
    down: Callable[[int, str], None]
    load: Callable[[int, EngineLoad], None]
    snapshot: Callable[[int, Snapshot], None]


class EngineConnection:
    """What the engine says of itself, and the two channels.  Belongs to one event loop."""

    def __init__(
        self, index: int, address: EngineAddress, stall_seconds: float, listener: Listener
    ) -> None:
        self.index = index
        self.ready: Ready | None = None
        self.progress: Progress | None = None
        self.down: str | None = None
        self.stats = Stats()
        self._address, self._stall_seconds, self._listener = address, stall_seconds, listener
        self._sender: Sender[ToEngine] = Sender(address.engine)
        self._receiver: AsyncReceiver[FromEngine] | None = None
        self._last_message_at = time.monotonic()
        self._undelivered_steps: list[StepOutput] = []  # received since the last delivery

    def start(self, client: int) -> None:
        """Listen from now on, on the running event loop; client: the API process's index."""
        decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
        self._receiver = AsyncReceiver(self._address.own, decoder, self.handle, self._deliver_steps)
        self._sender.send(Hello(client))

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._sender.close()

    def send(self, message: ToEngine) -> None:
        self._sender.send(message)

    def stalled(self) -> float:
        """Seconds for which it has been silent, if that is too long; else 0."""
        silent = time.monotonic() - self._last_message_at
        # The engine sends a message once a second when idle, else after every step; a large model
        # on a CPU has long steps.
        timeout = max(self._stall_seconds, 5 * self.stats.step_seconds)
        return silent if self.ready is not None and silent > timeout else 0.0

    def handle(self, message: FromEngine) -> None:
        self._last_message_at = time.monotonic()
        if isinstance(message, StepOutput):
            self._undelivered_steps.append(message)
            return
        self._deliver_steps()
        match message:
            case Progress():
                self.progress = message
            case Snapshot():
                if self.ready is not None:
                    self._listener.snapshot(self.index, message)
            case EngineLoad():
                if self.ready is not None:
                    self._listener.load(self.index, message)
            case Ready():
                self._on_ready(message)
            case EngineDown():
                known = self.ready.epoch if self.ready is not None else 0
                if message.epoch is None or message.epoch >= known:
                    self._on_down(message.reason)

    def _deliver_steps(self) -> None:
        """Deliver the outputs of all steps received since the last delivery."""
        steps, self._undelivered_steps = self._undelivered_steps, []
        if not steps or self.ready is None:
            return  # from an engine that died: its requests were submitted again or have ended
        self.stats = steps[-1].stats
        deliver = self._listener.output
        if len(steps) == 1:
            for output in _outputs_of(steps[0]):
                deliver(output)
            return
        merged_outputs: dict[int, RequestOutput] = {}
        for step in steps:
            for output in _outputs_of(step):
                earlier = merged_outputs.get(output.id)
                merged_outputs[output.id] = output if earlier is None else merged(earlier, output)
        for output in merged_outputs.values():
            deliver(output)

    def _on_ready(self, ready: Ready) -> None:
        if self.ready is not None:
            if self.ready.epoch == ready.epoch:
                return
            # The engine was restarted, and this message overtook the launcher's EngineDown.
            self._on_down("the engine was restarted")
        self.ready = ready
        self.down = None
        self.progress = None
        self._listener.ready(self.index)

    def _on_down(self, reason: str) -> None:
        self.ready = None
        self.progress = None
        self.down = reason
        self.stats = Stats()
        self._sender.reopen()
        self._listener.down(self.index, reason)


def _outputs_of(step: StepOutput) -> Iterator[RequestOutput]:
    for id, token in zip(array("q", step.ids), array("i", step.tokens), strict=True):
        yield RequestOutput(id, [token])
    yield from step.outputs
