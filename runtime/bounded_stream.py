"""BoundedStream: text to a descriptor whose reader may have stopped reading.

A pipe without a reader is full after 64 KiB, and a terminal can be stopped: a write to it would
wait for ever, and with it the event loop or the engine.
"""

from __future__ import annotations

import io
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from threading import RLock
from typing import TextIO, cast

WAIT_SECONDS = 0.1  # for a slow reader; not again before it has read
MAX_BEGUN = 1 << 16  # characters of a line that has not ended
FOLDER = "/proc/self/fd"  # of the descriptors of this process


class BoundedStream(io.TextIOBase):
    """Waits for a moment, then drops lines and counts them.

    A line is written as a whole, what is left of it later; `note` makes the line that says, once
    text is read again, how many are missing.
    """

    def __init__(self, stream: TextIO, note: Callable[[int], str]) -> None:
        """Takes the place of `stream`, whose descriptor stays as it is for other processes."""
        self._note = note
        self._stream, self._descriptor = stream, stream.fileno()
        self._write_some = _writer(self._descriptor)
        self._lock = RLock()
        self._begun = ""  # a line
        self._rest = b""  # of a line, of which a part is written
        self._lost = 0

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True

    def write(self, text: str, /) -> int:
        with self._lock:
            self._begun += text
            end = self._begun.rfind("\n") + 1
            if end or len(self._begun) > MAX_BEGUN:
                end = end or len(self._begun)
                whole, self._begun = self._begun[:end], self._begun[end:]
                self._put(whole)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            whole, self._begun = self._begun, ""
            if whole:
                self._put(whole)
            else:
                self._rest = self._written(self._rest, time.monotonic())

    def _put(self, text: str) -> None:
        deadline = time.monotonic() + (0.0 if self._lost or self._rest else WAIT_SECONDS)
        self._rest = self._written(self._rest, deadline)
        if self._lost and not self._rest and self._begin(self._note(self._lost), deadline):
            self._lost = 0
        if self._rest or self._lost or not self._begin(text, deadline):
            self._lost += max(1, text.count("\n"))

    def _begin(self, text: str, deadline: float) -> bool:
        """Whether a part of it is written; what is left is written before anything else."""
        data = text.encode(self.encoding, "backslashreplace")
        left = self._written(data, deadline)
        if len(left) < len(data):
            self._rest = left
        return len(left) < len(data)

    def _written(self, data: bytes, deadline: float) -> bytes:
        """What is left of `data` at the deadline."""
        while data:
            try:
                data = data[self._write_some(data) :]
            except BlockingIOError:
                seconds = deadline - time.monotonic()
                if seconds <= 0 or not _has_room(self._descriptor, seconds):
                    break
            except OSError:  # the reader is gone
                break
        return data


def missing(lines: int) -> str:
    return f"lines are missing here ({lines}), since they were not read in time"


def bounded(
    stream: TextIO, note: Callable[[int], str] = lambda lines: missing(lines) + "\n"
) -> TextIO:
    """A BoundedStream for `stream`."""
    return cast(TextIO, BoundedStream(stream, note))


def _writer(descriptor: int) -> Callable[[bytes], int]:
    """Writes what there is room for, and raises BlockingIOError if there is none.

    The descriptor is not made non-blocking, since programs that share it would be surprised.
    """
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISSOCK(mode):  # of journald
        return lambda data: _send(descriptor, data)
    if stat.S_ISFIFO(mode) or os.isatty(descriptor):
        try:
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY
            own = os.open(f"{FOLDER}/{descriptor}", flags)
        except OSError:  # it belongs to another user
            return lambda data: _write_where_room(descriptor, data)
        return lambda data: os.write(own, data)
    return lambda data: os.write(descriptor, data)  # a file does not wait for a reader


def _send(descriptor: int, data: bytes) -> int:
    shared = socket.socket(fileno=descriptor)
    try:
        return shared.send(data, socket.MSG_DONTWAIT)
    finally:
        shared.detach()


def _write_where_room(descriptor: int, data: bytes) -> int:
    if not _has_room(descriptor, 0.0):
        raise BlockingIOError
    return os.write(descriptor, data[: select.PIPE_BUF])  # waits if another one was faster


def _has_room(descriptor: int, seconds: float) -> bool:
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    return bool(ready.poll(1000 * seconds))
