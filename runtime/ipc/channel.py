"""One-way typed channels between the processes of one server: the only file that knows ZMQ.

A `Receiver` binds its address and takes from any number of `Sender`s.  Messages travel as
MessagePack over Unix sockets.  Queues have no length limit, so that neither side ever waits for
the other; the protocol bounds them: the server limits its open requests, and the mailbox of each
request merges its outputs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Generic, TypeVar, cast

import msgspec
import zmq

T = TypeVar("T")

READABLE = int(zmq.POLLIN)
BURST = 64  # messages handled before the event loop runs other callbacks
CLOSING_MS = 1000  # closing takes some 0.1 ms, longer where ZMQ's thread finds no free core
_closings = count()


@cache
def _context(low_priority: bool) -> zmq.Context[zmq.Socket[bytes]]:
    context = zmq.Context()
    if not low_priority:
        return context
    with ThreadPoolExecutor(1) as pool:  # another thread: this one keeps its priority
        if pool.submit(lower_priority).result():  # otherwise ZMQ would abort the process
            context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


def lower_priority() -> bool:
    """Waking up this thread preempts no other from now on.  False where that is not possible."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return True
    return False


def _open(kind: int, low_priority: bool) -> zmq.Socket[bytes]:
    socket = _context(low_priority).socket(kind)
    socket.set(zmq.LINGER, 0)  # closing drops unsent messages: their reader has gone
    socket.set(zmq.SNDHWM, 0)
    socket.set(zmq.RCVHWM, 0)
    return socket


def _bound(address: str, low_priority: bool = False) -> zmq.Socket[bytes]:
    socket = _open(zmq.PULL, low_priority)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def _close(socket: zmq.Socket[bytes]) -> None:
    """Close a socket, and wait until ZMQ's own threads have closed its connections.

    Until then a sender could still deliver its unsent messages to a receiver that is bound now,
    and a receiver could remove the file of another that was bound to the same address.
    """
    if socket.closed:
        return
    address = f"inproc://closing-{next(_closings)}"  # a name of a closed socket is kept for a while
    context = cast("zmq.Context[zmq.Socket[bytes]]", socket.context)  # pyright: ignore[reportUnknownMemberType]
    with context.socket(zmq.PAIR) as monitor:
        with socket:
            socket.monitor(address, zmq.EVENT_MONITOR_STOPPED)  # the last event of a socket
            monitor.connect(address)
        monitor.poll(CLOSING_MS)


class Sender(Generic[T]):
    """The sending end.  The receiver may start later: messages wait for it."""

    def __init__(self, address: str, *, low_priority: bool = False) -> None:
        """low_priority: ZMQ's I/O thread never preempts the sending thread, which would otherwise
        wait inside `send` when no other core is free."""
        self.address = address
        self._low_priority = low_priority
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = _open(zmq.PUSH, self._low_priority)
        # Reconnect soon after a new receiver binds the same address.
        socket.set(zmq.RECONNECT_IVL, 10)
        socket.set(zmq.RECONNECT_IVL_MAX, 200)
        socket.connect(self.address)
        return socket

    def send(self, message: T) -> None:
        """Queue a message; never blocks."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def reopen(self) -> None:
        """Drop all unsent messages, for a receiver that was restarted."""
        _close(self._socket)
        self._socket = self._connect()

    def close(self) -> None:
        _close(self._socket)


class Receiver(Generic[T]):
    """The receiving end for a thread, which may block."""

    def __init__(
        self, address: str, decoder: msgspec.msgpack.Decoder[T], *, low_priority: bool = False
    ) -> None:
        """low_priority: ZMQ's I/O thread never preempts another thread when it wakes up."""
        self._decoder = decoder
        self._socket = _bound(address, low_priority)

    def receive(self, timeout_seconds: float = 0.0) -> list[T]:
        """All messages that have arrived; waits up to the timeout for a first one."""
        messages = self._arrived()
        if not messages and timeout_seconds > 0 and self._socket.poll(int(timeout_seconds * 1000)):
            messages = self._arrived()
        return messages

    def _arrived(self) -> list[T]:
        messages: list[T] = []
        # Polling EVENTS costs less than a recv() that raises Again.
        while cast(int, self._socket.get(zmq.EVENTS)) & READABLE:
            messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return messages

    def close(self) -> None:
        _close(self._socket)


class AsyncReceiver(Generic[T]):
    """The receiving end for an event loop: calls `handle` with each message, in order.

    It calls `after_batch` once no message is left, and after every BURST messages.
    """

    def __init__(
        self,
        address: str,
        decoder: msgspec.msgpack.Decoder[T],
        handle: Callable[[T], None],
        after_batch: Callable[[], None] = lambda: None,
    ) -> None:
        self._decoder = decoder
        self._handle = handle
        self._after_batch = after_batch
        self._socket = _bound(address)
        self._loop = asyncio.get_running_loop()
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._drain)
        self._soon = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        # The descriptor is edge-triggered: drain it, or schedule the rest.
        for _ in range(BURST):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._after_batch()
                return
            self._handle(self._decoder.decode(frame))
            if self._socket.closed:
                return
        self._after_batch()
        if not self._socket.closed:
            self._soon = self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._soon.cancel()
            _close(self._socket)
