"""EngineClient while its engine loads, is silent, ends and starts again."""

from __future__ import annotations

import asyncio

from runtime.ipc.client import EngineClient
from runtime.messages import BACKGROUND, EngineDown, Progress, RequestOutput, StepOutput
from runtime.stats import Stats
from tests.support.engine.played_engine import (
    PARAMS,
    PlayedEngine,
    get,
    ready,
    serve,
    until,
)


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


async def test_requests_that_wait_for_an_engine_are_sent_when_it_is_ready(
    engine: PlayedEngine, client: EngineClient
) -> None:
    with client.sent_together():
        mailboxes = [client.submit([1], PARAMS) for _ in range(2)]
    await serve(engine, client)
    assert await engine.read(2) == [mailbox.request for mailbox in mailboxes]


async def test_abort_before_the_engine_is_ready_ends_the_request_here(
    engine: PlayedEngine, client: EngineClient
) -> None:
    mailbox = client.submit([1], PARAMS)
    client.abort(mailbox.id)
    assert (await get(mailbox)).finish == "abort"
    await serve(engine, client)
    assert engine.receive(0.05) == []
    assert client.pending == 0


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
    # A late output of the dead engine cannot reach the request that runs again.
    engine.step(RequestOutput(old_id, [66]), RequestOutput(unread.id, [7], finish="length"))
    assert await get(unread) == RequestOutput(unread.id, [7], finish="length")


async def test_a_request_under_which_an_engine_died_twice_ends_with_an_error(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    mailbox = client.submit([1], PARAMS)
    client.engines[0].handle(EngineDown("killed by signal 11", epoch=0))
    client.engines[0].handle(ready(epoch=1))
    later = client.submit([2], PARAMS)
    client.engines[0].handle(EngineDown("killed by signal 11", epoch=1))
    output = await get(mailbox)
    assert output.finish == "error" and output.error is not None
    assert output.error.startswith("killed by signal 11; 2 engines have ended under this request")
    client.engines[0].handle(ready(epoch=2))
    assert client.pending == 1 and later.engine == 0, "one engine has ended under that one"


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


async def test_that_an_older_engine_is_down_does_not_stop_a_newer_one(
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


async def test_a_silent_engine_is_unhealthy_until_it_sends_a_message(
    engine: PlayedEngine, client: EngineClient
) -> None:
    await serve(engine, client)
    assert client.unhealthy() is None
    client.engines[0]._last_message_at -= 31.0  # as if it had sent nothing for so long
    assert "pending: 0" in (client.unhealthy() or "")
    mailbox = client.submit([1], PARAMS)
    assert "pending: 1" in (client.unhealthy() or "")
    engine.step(RequestOutput(mailbox.id, [2]))
    await get(mailbox)
    assert client.unhealthy() is None
    assert client.stats == Stats(steps=1)


async def test_closing_ends_open_requests_with_an_error(
    engine: PlayedEngine, client: EngineClient
) -> None:
    mailbox = client.submit([1], PARAMS)
    client.close()
    late = client.submit([2], PARAMS)
    for stopped in (mailbox, late):
        output = await get(stopped)
        assert output.finish == "error" and stopped.stopped
        assert output.error == "the server is shutting down: send the request to another one"
    assert client.pending == 0


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
