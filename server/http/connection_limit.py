"""ConnectionLimit: how many connections a process holds open, and which is closed for a new one.

Out of file descriptors, a process cannot accept: probes would find a dead server.  The limit stays
below, so that every connection is accepted and none waits for a descriptor.
"""

from __future__ import annotations

import logging
import resource
import time
from typing import Protocol

log = logging.getLogger("wavefill.server")

MAX_DESCRIPTORS = 1 << 16
RESERVED_DESCRIPTORS = 256  # for the listener, the engine's sockets, files, and a burst of callers
FOR_PROBES = 32  # connections that ordinary requests leave free
WARNING_SECONDS = 60.0  # between two lines of the log


class Connection(Protocol):
    """What the limit needs of a connection."""

    def has_unsent_bytes(self) -> bool: ...

    def cut(self) -> None:
        """Close it at once, whatever is unsent."""
        ...


class ConnectionLimit:
    """Counts the connections of one process, idle ones and those with a request in flight.

    One more than `max_open` replaces the one that has been idle longest; a request in flight is
    never cut.  Ordinary requests take at most `max_busy` connections, the rest is for probes.
    """

    def __init__(self, max_open: int = MAX_DESCRIPTORS) -> None:
        self.max_open = max_open
        self.max_busy = max_open - min(FOR_PROBES, max_open // 4)
        self._idle: dict[Connection, None] = {}  # by when they became idle, the longest first
        self._busy: set[Connection] = set()
        self._new: dict[Connection, float] = {}  # without a request so far, and since when
        self._warned = -WARNING_SECONDS

    def opened(self, connection: Connection) -> None:
        """A new connection has sent nothing yet.  It, or another one, may be cut."""
        self._idle[connection] = None
        self._new[connection] = time.monotonic()
        if len(self._idle) + len(self._busy) > self.max_open:
            evicted = self._longest_idle(connection)
            del self._idle[evicted]
            self._warn()
            evicted.cut()

    def _longest_idle(self, newest: Connection) -> Connection:
        """One that still reads an answer is spared as long as there is another one."""
        first = next(one for one in self._idle if one is newest or not one.has_unsent_bytes())
        return next(iter(self._idle)) if first is newest else first

    def _warn(self) -> None:
        now = time.monotonic()
        if now - self._warned >= WARNING_SECONDS:
            self._warned = now
            log.warning(
                "all %d connections are open: idle ones are closed for new ones; a higher limit of "
                "open files (ulimit -n) allows more",
                self.max_open,
            )

    def request_begun(self, connection: Connection) -> bool:
        """The headers of a request are complete.  False: only a probe should be answered."""
        self._idle.pop(connection, None)
        self._new.pop(connection, None)
        self._busy.add(connection)
        return len(self._busy) <= self.max_busy

    def request_ended(self, connection: Connection) -> None:
        """The answer is complete, and no other request waits on this connection."""
        if connection in self._busy:
            self._busy.remove(connection)
            self._idle[connection] = None

    def closed(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._new.pop(connection, None)
        self._busy.discard(connection)

    def has_unsent_bytes(self) -> bool:
        """Whether a caller has yet to read a part of its answer."""
        return any(one.has_unsent_bytes() for one in (*self._idle, *self._busy))

    def awaits_first_request(self, seconds: float) -> bool:
        """Whether a connection of the last `seconds` has had no request yet."""
        since = time.monotonic() - seconds
        return any(opened > since for opened in self._new.values())


def max_connections() -> int:
    """Let this process open as many files as the system grants; returns those for connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit - min(RESERVED_DESCRIPTORS, limit // 2)
