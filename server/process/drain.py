"""The drain: how an API process ends after SIGTERM without losing a request.

1. /readyz says 503, and every answer ends its connection; requests are served for `drain_delay`
   seconds, in which load balancers notice.
2. The port is closed: connect() is refused, so that a balancer takes another server.  Connections
   that are open are still served.
3. Requests that are open may finish within `drain_seconds`, and slow callers read their answers;
   then they end with an error.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable

from server.http.connection_limit import ConnectionLimit
from server.http.middleware import DrainState
from server.process.http_server import ApiServer
from server.process.listener import stop_handshakes
from server.state import ServerState

log = logging.getLogger("wavefill.server")

POLL_SECONDS = 0.05
# What a caller may take from its connection to its request: ten times a long way around the world.
FIRST_REQUEST_SECONDS = 2.0


async def drain(
    server: ApiServer,
    listener: socket.socket,
    gate: DrainState,
    state: ServerState,
    stop_batches: Callable[[], None],
) -> None:
    """Stop the server in the three steps above; batches stop at once."""
    client, config = state.client, state.config
    gate.draining = True
    stop_batches()

    # A dead engine is not restarted during a drain: there is nothing to wait for.
    def down() -> bool:
        return client.down is not None

    if config.drain_delay and client.ready is not None:
        log.info(
            "stopping: requests are served for another %g s (--drain-delay), then the port is "
            "closed; a second signal ends all at once",
            config.drain_delay,
        )
        await _until(down, time.monotonic() + config.drain_delay)
    await _close_listener(server, listener, answers=client.ready is not None)
    deadline = time.monotonic() + config.drain_seconds
    if gate.open_requests:
        log.info(
            "stopping: open requests (%d) have %g s to end; a second signal ends them at once",
            gate.open_requests,
            config.drain_seconds,
        )
    await _until(lambda: down() or _nothing_open(gate, server.limit), deadline)
    gate.ended = True
    client.close()  # open streams end with an error event
    for connection in list(server.server_state.connections):
        connection.shutdown()  # idle ones now, so that no request is sent on them any more
    server.should_exit = True


def _nothing_open(gate: DrainState, limit: ConnectionLimit) -> bool:
    """No request is open, none is on its way on a connection that was just made, and all answers
    have left this process."""
    return not (
        gate.open_requests
        or limit.awaits_first_request(FIRST_REQUEST_SECONDS)
        or limit.has_unsent_bytes()
    )


async def _until(condition: Callable[[], bool], deadline: float) -> None:
    while not condition() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_SECONDS)


async def _close_listener(server: ApiServer, listener: socket.socket, *, answers: bool) -> None:
    """Accept what has connected, then close this process's part of the port.

    answers: requests.  One that still starts leaves handshakes to the processes that do, whose port
    it is, too.
    """
    if answers:
        await asyncio.sleep(stop_handshakes(listener))
    for accepting in server.servers:
        accepting.close()
    listener.close()
