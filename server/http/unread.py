"""UnreadAnswers: what a process holds of answers that their clients do not read."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import struct
import termios
import time
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger("wavefill.server")

UNREAD_SECONDS = 60.0  # in which a client has to take something of what waits for it
LOOKS = 12  # at a connection in this time
MAX_UNREAD_BYTES = 1 << 30  # of all connections of a process
WARNING_SECONDS = 60.0  # between two lines of the log


class Connection(Protocol):
    """What is needed of a connection."""

    def unread_bytes(self) -> int: ...

    def cut(self) -> None:
        """Close it at once, whatever is unsent."""
        ...


class UnreadAnswers:
    """The connections whose clients do not read as fast as they are answered.

    One that takes nothing for UNREAD_SECONDS is cut, and so is the one that leaves most unread when
    all together leave more than MAX_UNREAD_BYTES.
    """

    def __init__(self, on_cut: Callable[[], None] = lambda: None) -> None:
        """`on_cut` is called for each connection that is cut."""
        self._on_cut = on_cut
        self._unread: dict[Connection, tuple[int, asyncio.TimerHandle]] = {}
        self._warned = -WARNING_SECONDS

    def paused(self, connection: Connection) -> None:
        """More waits for the client than its connection takes."""
        self._watch(connection, connection.unread_bytes(), 0)
        if sum(num_bytes for num_bytes, _ in self._unread.values()) > MAX_UNREAD_BYTES:
            largest = max(self._unread, key=lambda each: self._unread[each][0])
            self._cut(largest, f"all answers that wait had more than {MAX_UNREAD_BYTES} bytes")

    def resumed(self, connection: Connection) -> None:
        """Most of it has been taken, or the connection is closed."""
        if connection in self._unread:
            self._unread.pop(connection)[1].cancel()

    def _watch(self, connection: Connection, num_bytes: int, in_vain: int) -> None:
        loop, seconds = asyncio.get_running_loop(), UNREAD_SECONDS / LOOKS
        timer = loop.call_later(seconds, self._look, connection, num_bytes, in_vain)
        self._unread[connection] = num_bytes, timer

    def _look(self, connection: Connection, before: int, in_vain: int) -> None:
        num_bytes = connection.unread_bytes()
        if num_bytes < before:
            self._watch(connection, num_bytes, 0)
        elif in_vain + 1 < LOOKS:
            self._watch(connection, num_bytes, in_vain + 1)
        else:
            self._cut(connection, f"nothing of its answer was read for {UNREAD_SECONDS:g} s")

    def _cut(self, connection: Connection, reason: str) -> None:
        self.resumed(connection)
        self._on_cut()
        if time.monotonic() - self._warned >= WARNING_SECONDS:
            self._warned = time.monotonic()
            log.warning("a connection was closed: %s", reason)
        connection.cut()


def unacknowledged(transport: asyncio.Transport) -> int:
    """The bytes that the kernel keeps for the client; 0 where it does not say."""
    try:
        found = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
    except (OSError, ValueError):
        return 0
    return struct.unpack("i", found)[0]
