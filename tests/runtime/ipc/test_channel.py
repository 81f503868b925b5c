"""Channels: typed, ordered, one way; nothing blocks, and a reopened sender forgets."""

from __future__ import annotations

import asyncio
import os
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest

from runtime.ipc.channel import AsyncReceiver, Receiver, Sender
from runtime.messages import (
    Abort,
    EngineDown,
    EngineRequest,
    FromEngine,
    Progress,
    Ready,
    RequestOutput,
    SamplingParams,
    StepOutput,
    ToEngine,
    TokenLogprob,
)
from runtime.stats import Stats

TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)
FROM_ENGINE = msgspec.msgpack.Decoder(FromEngine)

REQUEST = EngineRequest(
    id=(3 << 40) + 7,
    client=3,
    tokens=[1, 2, 151_935],
    params=SamplingParams(
        max_tokens=5, seed=2**63 - 1, stop_ids=(0, 9), logit_bias={4: -100.0}, logprobs=2
    ),
    salt=b"\x00\xff",
    arrived=12.5,
)
FROM = [
    Progress("weights", 3, 10),
    Ready(0, "qwen3", "cpu", "float32", "mha", 97, 64, 16, 8, 4, 32, 1000, 2000, 0.5),
    StepOutput(
        [
            RequestOutput(7, [1, 2], logprobs=[TokenLogprob(-0.5, 1, [(1, -0.5)])]),
            RequestOutput(8, [], finish="error", error="logits are not finite"),
        ],
        Stats(running=2),
    ),
    EngineDown("killed by signal 9", 4),
]


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/socket"


def test_every_message_arrives_as_it_was_sent_and_in_order(address: str) -> None:
    receiver, sender = Receiver(address, FROM_ENGINE), Sender[FromEngine](address)
    for message in FROM:
        sender.send(message)
    got: list[FromEngine] = []
    while len(got) < len(FROM):
        got += receiver.receive(30.0)
    assert got == FROM
    sender.close()
    receiver.close()


def test_messages_sent_before_the_reader_exists_wait_for_it(address: str) -> None:
    sender = Sender[ToEngine](address)
    sender.send(REQUEST)
    sender.send(Abort(REQUEST.id))
    receiver = Receiver(address, TO_ENGINE)
    got: list[ToEngine] = []
    while len(got) < 2:
        got += receiver.receive(30.0)
    assert got == [REQUEST, Abort(REQUEST.id)]
    sender.close()
    receiver.close()


def test_receive_without_a_time_out_returns_at_once(address: str) -> None:
    receiver = Receiver(address, TO_ENGINE)
    assert receiver.receive() == []
    assert receiver.receive(0.01) == []
    receiver.close()


def test_reopened_sender_forgets_messages_that_were_not_read(address: str) -> None:
    # Many times: what is closed only after `reopen` has returned reaches the new reader sometimes.
    with closing(Sender[ToEngine](address)) as sender:
        for number in range(1, 20):
            sender.send(Abort(-number))
            sender.reopen()
            sender.send(Abort(number))
            with closing(Receiver(address, TO_ENGINE)) as receiver:
                assert receiver.receive(30.0) == [Abort(number)]
                assert receiver.receive() == []


def test_sender_reaches_a_reader_that_was_restarted(address: str) -> None:
    with closing(Sender[ToEngine](address)) as sender:
        for number in range(20):  # many: a reader that is still closing would take the address
            with closing(Receiver(address, TO_ENGINE)) as receiver:
                sender.send(Abort(number))
                assert receiver.receive(30.0) == [Abort(number)]
            sender.reopen()


def test_sender_never_blocks_however_much_is_queued(address: str) -> None:
    sender = Sender[ToEngine](address)
    for number in range(20_000):  # far over ZMQ's default limit of 1000
        sender.send(Abort(number))
    receiver = Receiver(address, TO_ENGINE)
    got: list[ToEngine] = []
    while len(got) < 20_000:
        got += receiver.receive(30.0)
    assert got == [Abort(number) for number in range(20_000)]
    sender.close()
    receiver.close()


async def test_event_loop_end_takes_from_several_senders(address: str) -> None:
    got: list[ToEngine] = []
    done = asyncio.Event()

    def handle(message: ToEngine) -> None:
        got.append(message)
        if len(got) == 600:
            done.set()

    receiver = AsyncReceiver(address, TO_ENGINE, handle)
    senders = [Sender[ToEngine](address) for _ in range(3)]
    for number in range(200):
        for which, sender in enumerate(senders):
            sender.send(Abort(which * 1000 + number))
    await asyncio.wait_for(done.wait(), 10)
    for which in range(3):
        own = [m.id for m in got if isinstance(m, Abort) and m.id // 1000 == which]
        assert own == [which * 1000 + number for number in range(200)]
    for sender in senders:
        sender.close()
    receiver.close()


async def test_the_event_loop_receives_a_message_that_comes_after_a_pause(address: str) -> None:
    got: asyncio.Queue[ToEngine] = asyncio.Queue()
    receiver, sender = (
        AsyncReceiver(address, TO_ENGINE, got.put_nowait),
        Sender[ToEngine](address),
    )
    for number in range(5):
        sender.send(Abort(number))
        assert await asyncio.wait_for(got.get(), 30) == Abort(number)
        await asyncio.sleep(0.02)
    sender.close()
    receiver.close()


async def test_event_loop_end_may_be_closed_by_its_own_handler(address: str) -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: failures.append(context.get("exception"))
    )
    handled: list[ToEngine] = []
    closed = asyncio.Event()

    def handle(message: ToEngine) -> None:
        handled.append(message)
        receiver.close()
        closed.set()

    receiver = AsyncReceiver(address, TO_ENGINE, handle)
    sender = Sender[ToEngine](address)
    for number in range(3):
        sender.send(Abort(number))
    await asyncio.wait_for(closed.wait(), 20)
    await asyncio.sleep(0)  # callbacks that were scheduled before run now
    assert handled == [Abort(0)] and failures == []
    sender.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has this policy")
def test_a_patient_channel_passes_messages_on_in_a_thread_that_takes_no_core(
    tmp_path: Path,
) -> None:
    with (
        closing(Receiver(f"ipc://{tmp_path}/patient", TO_ENGINE, low_priority=True)) as receiver,
        closing(Sender[ToEngine](f"ipc://{tmp_path}/patient", low_priority=True)) as sender,
    ):
        sender.send(Abort(7))
        assert receiver.receive(10.0) == [Abort(7)]
    policies: set[int] = set()
    for thread in os.listdir("/proc/self/task"):  # ZMQ's may be of an earlier test: they are kept
        with suppress(ProcessLookupError):
            policies.add(os.sched_getscheduler(int(thread)))
    assert os.SCHED_BATCH in policies
