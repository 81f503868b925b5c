"""Bytes that one process writes and others read through shared memory."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from runtime.ipc import broadcast
from runtime.ipc.broadcast import BroadcastReceiver, BroadcastSender, Ends, RankLost


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends.create(2)
    yield made
    for descriptor in {made.memory, *(end for pipe in made.pipes for end in pipe)}:
        with suppress(OSError):  # the test has closed it
            os.close(descriptor)


def receiver_of(ends: Ends, reader: int) -> BroadcastReceiver:
    return BroadcastReceiver(*ends.of_reader(reader), reader=reader, readers=len(ends.pipes))


def test_every_reader_gets_every_message_in_order(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    """Also those that are longer than the ring, and while the ring goes round many times."""
    monkeypatch.setattr(broadcast, "CAPACITY", 4096)
    monkeypatch.setattr(broadcast, "LARGEST", 1000)
    draw = random.Random(0)
    messages = [draw.randbytes(draw.choice([0, 1, 7, 300, 999, 5000])) for _ in range(300)]
    found: list[list[bytes]] = [[], []]

    def read(reader: int) -> None:
        receiver = receiver_of(ends, reader)
        for _ in messages:
            found[reader].append(receiver.receive())
            if reader and draw.random() < 0.05:
                time.sleep(0.002)  # a slow one holds the writer back, and loses nothing

    threads = [threading.Thread(target=read, args=(reader,)) for reader in range(2)]
    for thread in threads:
        thread.start()
    sender = BroadcastSender(ends, stall_seconds=30)
    for message in messages:
        sender.send(message)
    for thread in threads:
        thread.join(60)
    assert found == [messages, messages]


def test_a_reader_that_sleeps_is_woken_up(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast, "SLEEP_SECONDS", 60.0)
    sender, found = BroadcastSender(ends, stall_seconds=30), []
    receiver = receiver_of(ends, 0)
    thread = threading.Thread(target=lambda: found.append(receiver.receive()))
    thread.start()
    deadline = time.monotonic() + 20
    while not receiver._asleep[0]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.05)  # it is in its select by now
    sender.send(b"up")
    thread.join(20)
    assert found == [b"up"]


def test_a_reader_ends_with_the_writer(ends: Ends):
    receiver = receiver_of(ends, 0)
    os.close(ends.pipes[0][1])
    with pytest.raises(RankLost, match="rank 0 has ended"):
        receiver.receive()


def test_a_reader_that_hangs_is_named_by_its_rank(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(broadcast, "CAPACITY", 4096)
    monkeypatch.setattr(broadcast, "LARGEST", 1000)
    sender, receiver = BroadcastSender(ends, stall_seconds=0.1), receiver_of(ends, 0)
    with pytest.raises(RankLost, match=r"rank 2 has not taken a step for 0 s"):
        while True:
            sender.send(bytes(900))
            receiver.receive()


def test_bytes_that_do_not_fit_their_checksum_are_an_error(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(broadcast, "TORN_SECONDS", 0.05)
    BroadcastSender(ends, stall_seconds=30).send(b"a step")
    receiver = receiver_of(ends, 1)
    receiver._ring._data[broadcast.HEADER] ^= 1
    with pytest.raises(RankLost, match="checksum"):
        receiver.receive()
