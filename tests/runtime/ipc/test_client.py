"""EngineClient against an engine played by the test: requests, outputs and their order."""

from __future__ import annotations

import asyncio
import time
from array import array

import msgspec
import pytest

from runtime.ipc.client import CLIENT_BITS, EngineClient
from runtime.messages import (
    Abort,
    EngineRequest,
    EngineRequests,
    PromptImage,
    RequestOutput,
    StepOutput,
)
from runtime.stats import Stats
from tests.support.engine.played_engine import (
    PARAMS,
    PlayedEngine,
    get,
    ready,
    serve,
)


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


async def test_ids_carry_the_index_of_the_api_process(client: EngineClient) -> None:
    ids = [client.submit([1], PARAMS).id for _ in range(3)]
    assert [id >> CLIENT_BITS for id in ids] == [2, 2, 2]
    assert len(set(ids)) == 3


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


async def test_a_cancelled_reader_leaves_the_mailbox_usable(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    mailbox = client.submit([1], PARAMS)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(mailbox.get(), 0.02)
    engine.step(RequestOutput(mailbox.id, [2]))
    assert (await get(mailbox)).tokens == [2]


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
