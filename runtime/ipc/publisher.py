"""Clients: the API processes as the engine process sees them, and what it tells whom when."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from runtime.ipc.channel import Sender
from runtime.messages import FromEngine, Output, Progress, Request, Stats, StepOutput

if TYPE_CHECKING:
    from runtime.scheduler.outputs import News  # needs NumPy, which takes a while to import

IDLE_SECONDS = 1.0  # between two signs of life
STATS_SECONDS = 0.05  # between two messages that carry statistics alone
PROGRESS_SECONDS = 0.1
ID_IN_USE = "a request of this id is under way already"


class Clients:
    """The API processes: who waits for which request, and what is sent to whom when."""

    def __init__(self, addresses: list[str]) -> None:
        self._senders: list[Sender[FromEngine]] = [Sender(address) for address in addresses]
        self._client_of: dict[int, int] = {}
        self._pending = [0] * len(addresses)
        self._told = [0.0] * len(addresses)

    def expect(self, request: Request, stats: Stats) -> bool:
        """Remember who asked.  False: the id is in use, and the client has been told so.

        That is a mistake of one API process: nobody else's requests should end for it.
        """
        if request.id in self._client_of:
            refusal = Output(request.id, [], finish="error", error=ID_IN_USE, refused=True)
            self.tell_one(request.client, StepOutput([refusal], stats))
            return False
        self._client_of[request.id] = request.client
        self._pending[request.client] += 1
        return True

    def requests_of(self, client: int) -> list[int]:
        return [id for id, owner in self._client_of.items() if owner == client]

    def publish(self, news: News, stats: Stats) -> None:
        """One message for each client that has news, or has waited a while for a word."""
        now = time.monotonic()
        for client, (ids, tokens, outputs) in enumerate(self._shares(news)):
            patience = STATS_SECONDS if self._pending[client] else IDLE_SECONDS
            if ids or outputs or now - self._told[client] >= patience:
                self._told[client] = now
                self._senders[client].send(StepOutput(outputs, stats, ids, tokens))

    def _shares(self, news: News) -> list[tuple[bytes, bytes, list[Output]]]:
        """The news by client, as StepOutput has them; requests that have ended are forgotten."""
        ids, tokens = news.ids, news.tokens
        if len(self._senders) == 1:
            shares = [(ids.tobytes(), tokens.tobytes(), news.outputs)]
        else:
            outputs: list[list[Output]] = [[] for _ in self._senders]
            for output in news.outputs:
                outputs[self._client_of[output.id]].append(output)
            own = [news.clients == client for client in range(len(self._senders))]
            shares = [
                (ids[mine].tobytes(), tokens[mine].tobytes(), more)
                for mine, more in zip(own, outputs, strict=True)
            ]
        for output in news.outputs:
            if output.finish is not None:
                self._pending[self._client_of.pop(output.id)] -= 1
        return shares

    def tell(self, message: FromEngine) -> None:
        for client in range(len(self._senders)):
            self.tell_one(client, message)

    def tell_one(self, client: int, message: FromEngine) -> None:
        self._senders[client].send(message)

    def close(self) -> None:
        for sender in self._senders:
            sender.close()


class ProgressReport:
    """Tells the clients what is being loaded, without flooding them."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self._phase = ""
        self._told = 0.0

    def __call__(self, phase: str, done: int, total: int) -> None:
        now = time.monotonic()
        if phase != self._phase or now - self._told >= PROGRESS_SECONDS:
            self._phase, self._told = phase, now
            self._clients.tell(Progress(phase, done, total))
