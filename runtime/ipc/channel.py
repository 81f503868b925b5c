"""One-way typed channels between the processes of one server: the only file that knows ZMQ.

A `Receiver` binds its address and takes from any number of `Sender`s.  Messages travel as
MessagePack over Unix sockets.  Queues have no length limit, so that no side ever waits for the
other; what bounds them is the protocol: requests are counted at the edge, and outputs are merged
by the mailbox of their request.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Generic, TypeVar, cast

import msgspec
import zmq

T = TypeVar("T")

READABLE = int(zmq.POLLIN)
BURST = 64  # messages handled before the event loop gets its turn


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    return cast("zmq.Context[zmq.Socket[bytes]]", zmq.Context.instance())


@cache
def _low_priority_context() -> zmq.Context[zmq.Socket[bytes]]:
    context = zmq.Context()
    if _can_lower_priority():  # otherwise ZMQ would end the process
        context.set(zmq.THREAD_SCHED_POLICY, os.SCHED_BATCH)
    return context


def _can_lower_priority() -> bool:
    """Whether a thread may ask never to take a core from another one when it wakes up."""
    done: list[bool] = []

    def attempt() -> None:
        with suppress(AttributeError, OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            done.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(done)


def _open(kind: int, low_priority: bool) -> zmq.Socket[bytes]:
    socket = (_low_priority_context() if low_priority else _context()).socket(kind)
    socket.set(zmq.LINGER, 0)  # closing drops what was not sent: its reader has gone
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


class Sender(Generic[T]):
    """The end that writes.  The reader may come later: messages wait for it."""

    def __init__(self, address: str, *, low_priority: bool = False) -> None:
        """patient: the thread that passes messages on never takes a core from the one that sends,
        which would wait inside `send` where no other core is free."""
        self.address = address
        self._low_priority = low_priority
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = _open(zmq.PUSH, self._low_priority)
        # A new reader at the same address should hear from us soon after it starts.
        socket.set(zmq.RECONNECT_IVL, 10)
        socket.set(zmq.RECONNECT_IVL_MAX, 200)
        socket.connect(self.address)
        return socket

    def send(self, message: T) -> None:
        """Queue a message; never blocks."""
        self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def reopen(self) -> None:
        """Forget every message that was not sent, for a reader that was restarted."""
        self._socket.close()
        self._socket = self._connect()

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[T]):
    """The end that reads, for a thread that may wait."""

    def __init__(
        self, address: str, decoder: msgspec.msgpack.Decoder[T], *, low_priority: bool = False
    ) -> None:
        """patient: as of a Sender."""
        self._decoder = decoder
        self._socket = _bound(address, low_priority)

    def receive(self, timeout_seconds: float = 0.0) -> list[T]:
        """All messages that have arrived; waits up to the time-out for a first one."""
        messages = self._arrived()
        if not messages and timeout_seconds > 0 and self._socket.poll(int(timeout_seconds * 1000)):
            messages = self._arrived()
        return messages

    def _arrived(self) -> list[T]:
        messages: list[T] = []
        # Not until Again is raised, which takes longer than a message.
        while cast(int, self._socket.get(zmq.EVENTS)) & READABLE:
            messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        return messages

    def close(self) -> None:
        self._socket.close()


class AsyncReceiver(Generic[T]):
    """The end that reads, for an event loop: calls `handle` with each message, in order.

    `then` is called when those that were there have been handled, or BURST of them.
    """

    def __init__(
        self,
        address: str,
        decoder: msgspec.msgpack.Decoder[T],
        handle: Callable[[T], None],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        self._decoder = decoder
        self._handle = handle
        self._then = then
        self._socket = _bound(address)
        self._loop = asyncio.get_running_loop()
        self._fd = self._socket.fileno()
        self._loop.add_reader(self._fd, self._drain)
        self._soon = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        # The descriptor signals changes, not a state: read until nothing is left, or come back.
        for _ in range(BURST):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                self._then()
                return
            self._handle(self._decoder.decode(frame))
            if self._socket.closed:
                return
        self._then()
        if not self._socket.closed:
            self._soon = self._loop.call_soon(self._drain)

    def close(self) -> None:
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._soon.cancel()
            self._socket.close()
