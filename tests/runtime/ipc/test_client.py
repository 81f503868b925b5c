"""EngineClient against an engine played by the test: order, merging, abort, restart, health."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from runtime.ipc.channel import Receiver, Sender
from runtime.ipc.client import CLIENT_BITS, ClientNotifier, EngineAddress, EngineClient, Mailbox
from runtime.messages import (
    BACKGROUND,
    Abort,
    EngineDown,
    EngineRequest,
    EngineRequests,
    FromEngine,
    Hello,
    Progress,
    PromptImage,
    Ready,
    RequestOutput,
    SamplingParams,
    Stats,
    StepOutput,
    ToEngine,
)

PARAMS = SamplingParams(max_tokens=16)


def ready(epoch: int = 0) -> Ready:
    return Ready(epoch, "qwen3", "cpu", "float32", "mha", 97, 64, 16, 8, 4, 32, 1000, 2000, 0.5)


@dataclass
class PlayedEngine:
    """The engine's ends of the channels; `read` waits for messages without blocking the loop."""

    receiver: Receiver[ToEngine]
    sender: Sender[FromEngine]
    notifier: ClientNotifier

    def step(self, *outputs: RequestOutput) -> None:
        self.sender.send(StepOutput(list(outputs), Stats(steps=1)))

    def receive(self, timeout_seconds: float = 0.0) -> list[ToEngine]:
        """The messages that have come, without greetings."""
        messages = self.receiver.receive(timeout_seconds)
        return [message for message in messages if not isinstance(message, Hello)]

    async def read(self, count: int) -> list[ToEngine]:
        got: list[ToEngine] = []
        for _ in range(500):
            got += self.receive()
            if len(got) >= count:
                return got
            await asyncio.sleep(0.01)
        raise AssertionError(f"{len(got)} of {count} messages came")


def addresses(folder: Path) -> EngineAddress:
    return EngineAddress(f"ipc://{folder}/engine", f"ipc://{folder}/api-2")


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[PlayedEngine]:
    own = f"ipc://{tmp_path}/api-2"
    decoder = msgspec.msgpack.Decoder(ToEngine)
    played = PlayedEngine(
        Receiver(f"ipc://{tmp_path}/engine", decoder), Sender(own), ClientNotifier([own])
    )
    yield played
    played.receiver.close()
    played.sender.close()
    played.notifier.close()


@pytest.fixture
async def client(tmp_path: Path, engine: PlayedEngine) -> AsyncIterator[EngineClient]:
    client = EngineClient(2, [addresses(tmp_path)])
    await client.start()
    yield client
    client.close()


async def until(condition: object) -> None:
    """Wait until `condition()` is true."""
    assert callable(condition)
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition did not come true")


async def serve(engine: PlayedEngine, client: EngineClient) -> None:
    engine.sender.send(ready())
    await until(lambda: client.ready is not None)


async def get(mailbox: Mailbox) -> RequestOutput:
    return await asyncio.wait_for(mailbox.get(), 5)


async def test_tokens_reach_the_mailbox_of_their_request(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    first, second = client.submit([1, 2], PARAMS), client.submit([3], PARAMS, salt=b"s")
    requests = await engine.read(2)
    assert requests == [first.request, second.request]
    assert isinstance(requests[1], EngineRequest) and requests[1].salt == b"s"
    engine.step(RequestOutput(second.id, [7]), RequestOutput(first.id, [8]))
    assert (await get(first)).tokens == [8]
    assert (await get(second)).tokens == [7]
    engine.step(RequestOutput(first.id, [9], finish="length"))
    assert await get(first) == RequestOutput(first.id, [9], finish="length")
    assert client.pending == 1


async def test_images_travel_with_their_request_and_again_to_the_next_engine(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    image = PromptImage(1, 4, 64, 64, bytes(range(256)) * 48, b"d" * 32)
    mailbox = client.submit([1, 2, 2, 2, 2, 3], PARAMS, images=(image,))
    [request] = await engine.read(1)
    assert isinstance(request, EngineRequest) and request.images == (image,)
    engine.sender.send(ready(2))
    [again] = await engine.read(1)
    assert isinstance(again, EngineRequest) and again.images == (image,)
    assert again.id == mailbox.id != request.id


async def test_images_that_several_requests_share_are_sent_once(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    image = PromptImage(1, 4, 64, 64, bytes(range(256)) * 48, b"d" * 32)
    with client.sent_together():
        first, second = (
            client.submit([1, 2, 2, 2, 2, 3], PARAMS, images=(image,)) for _ in range(2)
        )
    [message] = await engine.read(1)
    assert isinstance(message, EngineRequests) and message.images == (image,)
    assert len(msgspec.msgpack.encode(message)) < 1.5 * len(image.pixels)
    found = message.whole()
    assert found == [first.request, second.request]
    assert found[0].images[0].pixels is found[1].images[0].pixels
    engine.step(RequestOutput(second.id, [7]), RequestOutput(first.id, [8]))
    assert (await get(first)).tokens == [8] and (await get(second)).tokens == [7]


async def test_one_request_alone_is_sent_as_it_is(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    with client.sent_together():
        mailbox = client.submit([1], PARAMS)
    assert await engine.read(1) == [mailbox.request]


async def test_requests_that_wait_for_an_engine_are_sent_when_it_is_ready(
    engine: PlayedEngine, client: EngineClient
) -> None:
    with client.sent_together():
        mailboxes = [client.submit([1], PARAMS) for _ in range(2)]
    await serve(engine, client)
    assert await engine.read(2) == [mailbox.request for mailbox in mailboxes]


async def test_ids_carry_the_index_of_the_api_process(client: EngineClient) -> None:
    ids = [client.submit([1], PARAMS).id for _ in range(3)]
    assert [id >> CLIENT_BITS for id in ids] == [2, 2, 2]
    assert len(set(ids)) == 3


async def test_requests_wait_here_until_the_engine_is_ready(
    engine: PlayedEngine, client: EngineClient
) -> None:
    mailbox = client.submit([1], PARAMS)
    engine.sender.send(Progress("weights", 1, 2))
    await until(lambda: client.progress is not None)
    assert client.progress == Progress("weights", 1, 2)
    assert engine.receive(0.05) == []
    assert client.unhealthy() is None
    await serve(engine, client)
    assert await engine.read(1) == [mailbox.request]
    assert client.progress is None


async def test_unread_outputs_are_merged_into_one(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    mailbox, other = client.submit([1], PARAMS), client.submit([1], PARAMS)
    engine.step(RequestOutput(mailbox.id, [1], cached=16, started=2.5))
    for token in range(2, 200):
        engine.step(RequestOutput(mailbox.id, [token]))
    engine.step(RequestOutput(mailbox.id, [0], finish="stop", stop_id=0))
    engine.step(RequestOutput(other.id, [5]))
    await get(other)
    assert await get(mailbox) == RequestOutput(
        mailbox.id, [*range(1, 200), 0], finish="stop", stop_id=0, cached=16, started=2.5
    )


async def test_output_of_an_unknown_request_is_dropped(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    mailbox = client.submit([1], PARAMS)
    engine.step(RequestOutput(12345, [1]), RequestOutput(mailbox.id, [2], finish="length"))
    assert (await get(mailbox)).tokens == [2]
    engine.step(RequestOutput(mailbox.id, [3]))
    other = client.submit([1], PARAMS)
    engine.step(RequestOutput(other.id, [4]))
    assert (await get(other)).tokens == [4]
    assert mailbox._output is None


async def test_abort_is_sent_once_and_answered_by_the_engine(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    mailbox = client.submit([1], PARAMS)
    client.abort(mailbox.id)
    client.abort(mailbox.id)
    client.abort(999)
    assert await engine.read(2) == [mailbox.request, Abort(mailbox.id)]
    engine.step(RequestOutput(mailbox.id, [], finish="abort"))
    assert (await get(mailbox)).finish == "abort"
    assert client.pending == 0
    assert engine.receive(0.05) == []


async def test_abort_before_the_engine_is_ready_ends_the_request_here(
    engine: PlayedEngine, client: EngineClient
) -> None:
    mailbox = client.submit([1], PARAMS)
    client.abort(mailbox.id)
    assert (await get(mailbox)).finish == "abort"
    await serve(engine, client)
    assert engine.receive(0.05) == []
    assert client.pending == 0


async def test_a_cancelled_reader_leaves_the_mailbox_usable(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    mailbox = client.submit([1], PARAMS)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mailbox.get(), 0.02)
    engine.step(RequestOutput(mailbox.id, [2]))
    assert (await get(mailbox)).tokens == [2]


async def test_dead_engine_fails_streams_that_began_and_reruns_the_others(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    began, unread, queued, gone = (client.submit([n], PARAMS) for n in range(4))
    engine.step(RequestOutput(began.id, [1]), RequestOutput(unread.id, [2]))
    assert (await get(began)).tokens == [1]
    client.abort(gone.id)
    old_id = unread.id
    await engine.read(5)

    engine.notifier.engine_down("killed by signal 9", epoch=0)
    await until(lambda: client.down is not None)
    assert client.unhealthy() == "killed by signal 9"
    assert await get(began) == RequestOutput(
        began.id, [], finish="error", error="killed by signal 9"
    )
    assert (await get(gone)).finish == "abort"
    assert client.pending == 2

    engine.sender.send(ready(epoch=1))
    assert await engine.read(2) == [unread.request, queued.request]
    assert unread.request.tokens == [1] and queued.request.tokens == [2]
    assert client.unhealthy() is None
    # A late word of the dead engine cannot reach the request that runs again.
    engine.step(RequestOutput(old_id, [66]), RequestOutput(unread.id, [7], finish="length"))
    assert await get(unread) == RequestOutput(unread.id, [7], finish="length")


async def test_outputs_that_come_while_the_engine_is_down_are_dropped(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    mailbox = client.submit([1], PARAMS)
    engine.notifier.engine_down("gone", epoch=0)
    await until(lambda: client.down is not None)
    engine.step(RequestOutput(mailbox.id, [1]))
    engine.sender.send(ready(epoch=1))
    await until(lambda: client.ready is not None)
    engine.step(RequestOutput(mailbox.id, [2]))
    assert (await get(mailbox)).tokens == [2]


async def test_word_of_an_older_engine_does_not_stop_a_newer_one(
    engine: PlayedEngine, client: EngineClient
) -> None:
    engine.sender.send(ready(epoch=0))
    engine.sender.send(ready(epoch=1))
    await until(lambda: client.ready == ready(epoch=1))
    mailbox = client.submit([1], PARAMS)
    engine.notifier.engine_down("old", epoch=0)
    engine.sender.send(Progress("still here"))
    await until(lambda: client.progress is not None)
    await asyncio.sleep(0.05)
    assert client.down is None
    engine.step(RequestOutput(mailbox.id, [2]))
    assert (await get(mailbox)).tokens == [2]


async def test_a_silent_engine_is_unhealthy_until_it_speaks(
    tmp_path: Path, engine: PlayedEngine
) -> None:
    client = EngineClient(2, [addresses(tmp_path)], stall_seconds=0.05)
    await client.start()
    await serve(engine, client)
    assert client.unhealthy() is None
    await asyncio.sleep(0.1)
    assert "pending: 0" in (client.unhealthy() or "")
    mailbox = client.submit([1], PARAMS)
    assert "pending: 1" in (client.unhealthy() or "")
    engine.step(RequestOutput(mailbox.id, [2]))
    await get(mailbox)
    assert client.unhealthy() is None
    assert client.stats == Stats(steps=1)
    client.close()


async def test_closing_ends_open_requests_with_an_error(
    engine: PlayedEngine, client: EngineClient
) -> None:
    mailbox = client.submit([1], PARAMS)
    client.close()
    output = await get(mailbox)
    assert output.finish == "error" and output.error == "the server is shutting down"


async def test_work_in_the_background_is_not_counted_as_pending(
    engine: PlayedEngine, client: EngineClient
):
    client.engines[0].handle(ready(epoch=1))
    boxes = [client.submit([1], PARAMS, priority=BACKGROUND) for _ in range(3)]
    plain = client.submit([1], PARAMS)
    assert client.pending == 1
    client.engines[0].handle(StepOutput([RequestOutput(boxes[0].id, [5], finish="stop")], Stats()))
    assert client.pending == 1
    client.engines[0].handle(EngineDown("it died", epoch=1))
    assert client.pending == 1
    client.abort(boxes[1].id)
    client.abort(plain.id)
    assert client.pending == 0
    client.submit([1], PARAMS)
    assert client.pending == 1


async def test_tokens_in_columns_are_outputs_of_one_token(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    first, second = client.submit([1], PARAMS), client.submit([2], PARAMS)
    ids, tokens = array("q", [second.id, 77, first.id]), array("i", [7, 6, 2**31 - 1])
    other = RequestOutput(second.id, [9], finish="length")
    engine.sender.send(StepOutput([other], Stats(), ids.tobytes(), tokens.tobytes()))
    assert await get(first) == RequestOutput(first.id, [2**31 - 1])
    assert await get(second) == RequestOutput(second.id, [7, 9], finish="length")


@pytest.mark.parametrize("drains", [False, True])
async def test_several_tokens_of_a_request_in_one_step_arrive_in_order(
    engine: PlayedEngine, client: EngineClient, drains: bool
) -> None:
    await serve(engine, client)
    one, other = client.submit([1], PARAMS), client.submit([2], PARAMS)
    taken: list[int] = []

    def take(output: RequestOutput) -> bool:
        taken.extend(output.tokens)
        return output.finish is None

    pouring = asyncio.ensure_future(one.drain(take)) if drains else None
    await asyncio.sleep(0)
    ids, tokens = array("q", [one.id, other.id, one.id, one.id]), array("i", [3, 4, 5, 6])
    last = RequestOutput(one.id, [7, 8], finish="stop", stop_id=8)
    engine.sender.send(StepOutput([last], Stats(), ids.tobytes(), tokens.tobytes()))
    if pouring is None:
        assert take(await get(one)) is False
    else:
        await asyncio.wait_for(pouring, 5)
    assert taken == [3, 5, 6, 7, 8]
    assert (await get(other)).tokens == [4]


async def test_steps_that_arrived_while_this_process_was_busy_are_delivered_together(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    mailbox, taken = client.submit([1], PARAMS), []

    def take(output: RequestOutput) -> bool:
        taken.append(output.tokens)
        return output.finish is None

    pouring = asyncio.ensure_future(mailbox.drain(take))
    await asyncio.sleep(0.05)
    for token in range(5):
        ids, tokens = array("q", [mailbox.id]), array("i", [token])
        engine.sender.send(StepOutput([], Stats(steps=token), ids.tobytes(), tokens.tobytes()))
    engine.step(RequestOutput(mailbox.id, [5], finish="length"))
    time.sleep(0.1)  # as busy as a process can be
    await asyncio.wait_for(pouring, 5)
    assert taken == [[0, 1, 2, 3, 4, 5]]
    assert client.pending == 0 and client.stats.steps == 1
