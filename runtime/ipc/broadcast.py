"""Broadcast: bytes from one process to others on the same host, through shared memory.

The writer appends records to a ring, and each reader follows at its own pace.  A reader that finds
none looks again for a moment, since the next step is queued soon while requests run; then it sets a
flag and sleeps at a pipe, into which the writer puts a byte if the flag is set.

    head          bytes that were ever written
    tail, asleep  of each reader
    data          records: length, checksum, and whether the message goes on in the next; bytes

A checksum covers each record, because a processor may make `head` visible before the bytes.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
import zlib
from dataclasses import dataclass

CAPACITY = 16 << 20  # a step is some KB; masks of many rows are MBs
LARGEST = CAPACITY // 4  # of a record; longer messages take several
NUMBERS = struct.Struct("<II")  # length, and 1 if the message goes on in the next record
CHECKSUM = struct.Struct("<I")
HEADER = NUMBERS.size + CHECKSUM.size
LINE = 64  # bytes of a line of the processor's cache
POLL_SECONDS = 0.0002  # a reader that waits for the next step
SLEEP_SECONDS = 0.1  # the longest sleep, in case a byte is late
FULL_SECONDS = 0.0005  # between two looks of the writer at a full ring
TORN_SECONDS = 1.0  # until bytes that do not fit their checksum are an error


class RankLost(RuntimeError):
    """Another rank of this model has stopped."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Descriptors of one ring, which child processes inherit."""

    memory: int
    pipes: tuple[tuple[int, int], ...]  # (read end, write end) of each reader

    @classmethod
    def create(cls, readers: int) -> Ends:
        memory = _anonymous_file(_data_at(readers) + CAPACITY)
        return cls(memory, tuple(os.pipe() for _ in range(readers)))

    def of_reader(self, reader: int) -> tuple[int, int]:
        """What a reader needs: memory, and the read end of its pipe."""
        return self.memory, self.pipes[reader][0]


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("wavefill-steps")
    else:
        import tempfile

        descriptor = os.dup(tempfile.TemporaryFile().fileno())  # noqa: SIM115
    os.ftruncate(descriptor, size)
    return descriptor


def _data_at(readers: int) -> int:
    """Where the data begins: each number before has a line to itself."""
    return LINE * (1 + 2 * readers)


class _Ring:
    def __init__(self, memory: int, readers: int) -> None:
        self._map = mmap.mmap(memory, _data_at(readers) + CAPACITY)
        view = memoryview(self._map)
        lines = [view[LINE * i :][:8].cast("q") for i in range(1 + 2 * readers)]
        self.head, self.tails, self.asleep = lines[0], lines[1::2], lines[2::2]
        self._data = view[_data_at(readers) :]

    def put(self, at: int, part: bytes) -> None:
        first = at % CAPACITY
        until_end = min(len(part), CAPACITY - first)
        self._data[first : first + until_end] = part[:until_end]
        self._data[: len(part) - until_end] = part[until_end:]

    def get(self, at: int, count: int) -> bytes:
        first = at % CAPACITY
        until_end = min(count, CAPACITY - first)
        return bytes(self._data[first : first + until_end]) + bytes(self._data[: count - until_end])


class BroadcastSender:
    def __init__(self, ends: Ends, *, stall_seconds: float) -> None:
        """stall_seconds: that a reader may leave a full ring unread."""
        self._ring, self._ends = _Ring(ends.memory, len(ends.pipes)), ends
        self._stall_seconds = stall_seconds
        for _, write_end in ends.pipes:
            os.set_blocking(write_end, False)

    def send(self, message: bytes) -> None:
        """Append a message.  Raises RankLost if a reader has not made room in time."""
        parts = [message[i : i + LARGEST] for i in range(0, len(message), LARGEST)] or [b""]
        for index, part in enumerate(parts):
            goes_on = index + 1 < len(parts)
            numbers = NUMBERS.pack(len(part), goes_on)
            self._append(numbers + CHECKSUM.pack(zlib.crc32(part, zlib.crc32(numbers))) + part)

    def _append(self, record: bytes) -> None:
        ring, head = self._ring, int(self._ring.head[0])
        deadline = time.monotonic() + self._stall_seconds
        while head + len(record) - min(int(tail[0]) for tail in ring.tails) > CAPACITY:
            if time.monotonic() > deadline:
                slow = min(range(len(ring.tails)), key=lambda reader: int(ring.tails[reader][0]))
                raise RankLost(
                    f"rank {1 + slow} has not taken a step for {self._stall_seconds:.0f} s"
                )
            time.sleep(FULL_SECONDS)
        ring.put(head, record)
        ring.head[0] = head + len(record)
        for (_, write_end), asleep in zip(self._ends.pipes, ring.asleep, strict=True):
            if asleep[0]:
                try:
                    os.write(write_end, b"\0")
                except BlockingIOError:  # it has many to wake up by
                    pass
                except BrokenPipeError:
                    raise RankLost("a rank has ended") from None


class BroadcastReceiver:
    def __init__(self, memory: int, pipe: int, *, reader: int, readers: int) -> None:
        self._ring, self._pipe = _Ring(memory, readers), pipe
        self._tail, self._asleep = self._ring.tails[reader], self._ring.asleep[reader]

    def receive(self) -> bytes:
        """The next message; waits for it.  Raises RankLost once the writer has gone."""
        parts: list[bytes] = []
        goes_on = True
        while goes_on:
            self._wait()
            part, goes_on = self._record()
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _record(self) -> tuple[bytes, bool]:
        ring, tail = self._ring, int(self._tail[0])
        deadline = time.monotonic() + TORN_SECONDS
        while True:
            numbers, (checksum,) = (
                ring.get(tail, NUMBERS.size),
                CHECKSUM.unpack(ring.get(tail + NUMBERS.size, CHECKSUM.size)),
            )
            length, goes_on = NUMBERS.unpack(numbers)
            if length <= LARGEST:
                part = ring.get(tail + HEADER, length)
                if zlib.crc32(part, zlib.crc32(numbers)) == checksum:
                    self._tail[0] = tail + HEADER + length
                    return part, bool(goes_on)
            if time.monotonic() > deadline:
                raise RankLost("the steps of rank 0 cannot be read: their checksum is wrong")

    def _wait(self) -> None:
        until = time.monotonic() + POLL_SECONDS
        while self._ring.head[0] == self._tail[0]:
            if time.monotonic() < until:
                continue
            self._asleep[0] = 1
            if self._ring.head[0] == self._tail[0]:
                self._sleep()
            self._asleep[0] = 0

    def _sleep(self) -> None:
        ready, _, _ = select.select([self._pipe], [], [], SLEEP_SECONDS)
        if ready and not os.read(self._pipe, 4096):
            raise RankLost("rank 0 has ended")
