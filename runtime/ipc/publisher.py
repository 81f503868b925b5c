"""OutputPublisher: sends outputs and statistics of the engine process to the API processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from runtime.ipc.channel import Sender
from runtime.messages import EngineRequest, FromEngine, Progress, RequestOutput, Stats, StepOutput

if TYPE_CHECKING:
    from runtime.scheduler.outputs import (
        EngineOutputs,  # imports NumPy, which takes a while
    )

IDLE_SECONDS = 1.0  # between two heartbeats
STATS_SECONDS = 0.05  # between two messages that carry statistics alone
PROGRESS_SECONDS = 0.1
ID_IN_USE = "a request with this id is running already"


class OutputPublisher:
    """Knows the API process (client) of each request, and sends each its share of a step."""

    def __init__(self, addresses: list[str]) -> None:
        self._senders: list[Sender[FromEngine]] = [Sender(address) for address in addresses]
        self._client_of: dict[int, int] = {}
        self._pending = [0] * len(addresses)
        self._last_sent = [0.0] * len(addresses)

    def register(self, request: EngineRequest, stats: Stats) -> bool:
        """Record the client of a request.  False: its id is in use, and it was answered so.

        That is a mistake of one API process, so the requests of the others continue.
        """
        if request.id in self._client_of:
            rejection = RequestOutput(
                request.id, [], finish="error", error=ID_IN_USE, is_request_error=True
            )
            self.send_to(request.client, StepOutput([rejection], stats))
            return False
        self._client_of[request.id] = request.client
        self._pending[request.client] += 1
        return True

    def requests_of(self, client: int) -> list[int]:
        return [id for id, owner in self._client_of.items() if owner == client]

    def publish(self, engine_outputs: EngineOutputs, stats: Stats) -> None:
        """Send each client its outputs, or statistics alone once their interval has passed."""
        now = time.monotonic()
        for client, (ids, tokens, outputs) in enumerate(self._split_by_client(engine_outputs)):
            interval = STATS_SECONDS if self._pending[client] else IDLE_SECONDS
            if ids or outputs or now - self._last_sent[client] >= interval:
                self._last_sent[client] = now
                self._senders[client].send(StepOutput(outputs, stats, ids, tokens))

    def _split_by_client(
        self, engine_outputs: EngineOutputs
    ) -> list[tuple[bytes, bytes, list[RequestOutput]]]:
        """(ids, tokens, outputs) of each client, as in StepOutput; drops finished requests."""
        ids, tokens = engine_outputs.ids, engine_outputs.tokens
        if len(self._senders) == 1:
            shares = [(ids.tobytes(), tokens.tobytes(), engine_outputs.outputs)]
        else:
            outputs: list[list[RequestOutput]] = [[] for _ in self._senders]
            for output in engine_outputs.outputs:
                outputs[self._client_of[output.id]].append(output)
            masks = [engine_outputs.clients == client for client in range(len(self._senders))]
            shares = [
                (ids[mask].tobytes(), tokens[mask].tobytes(), more)
                for mask, more in zip(masks, outputs, strict=True)
            ]
        for output in engine_outputs.outputs:
            if output.finish is not None:
                self._pending[self._client_of.pop(output.id)] -= 1
        return shares

    def broadcast(self, message: FromEngine) -> None:
        for client in range(len(self._senders)):
            self.send_to(client, message)

    def send_to(self, client: int, message: FromEngine) -> None:
        self._senders[client].send(message)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


class ProgressReport:
    """Sends the loading progress to the clients, at most every PROGRESS_SECONDS a phase."""

    def __init__(self, publisher: OutputPublisher) -> None:
        self._publisher = publisher
        self._phase = ""
        self._last_sent = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase != self._phase or now - self._last_sent >= PROGRESS_SECONDS:
            self._phase, self._last_sent = phase, now
            self._publisher.broadcast(Progress(phase, done, total))
