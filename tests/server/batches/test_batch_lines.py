"""When lines run, among other requests and with engines that fail."""

from __future__ import annotations

import asyncio
import inspect
import json
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from runtime.messages import BACKGROUND
from server.batches.background import BackgroundMetrics, BatchSlots
from server.batches.run import MAX_FAILURES
from server.constrained.grammar_client import GrammarChecker
from server.metrics.metrics import Metrics
from server.process.pipes import process_lost
from tests.support.server.batch_server import CHAT, BatchServer, batch_server, line

DAY = 86400


def test_no_method_of_the_metrics_of_lines_needs_the_series_that_they_have_not():
    """One that was inherited fails where it looks for its series, and the line gets 500."""
    public = inspect.getmembers(Metrics, inspect.isfunction)
    of_process = Mock(spec=Metrics)
    metrics = BackgroundMetrics(of_process)
    for name in (name for name, _ in public if not name.startswith("_")):
        assert name == "image_refused" or getattr(metrics, name)() is None, name
    assert of_process.mock_calls == []
    metrics.image_refused("format")
    of_process.image_refused.assert_called_once_with("format")


async def test_lines_run_behind_everything_else_and_do_not_fill_the_queue(tmp_path: Path):
    async with batch_server(tmp_path, max_queue=4) as server:
        server.engine.held = True
        server.run_batches()
        made = await server.create("".join(line(str(index)) for index in range(30)))
        while len(server.engine.requests) < 20:
            await asyncio.sleep(0.01)
        assert {request.priority for request in server.engine.requests} == {BACKGROUND}
        asking = asyncio.create_task(
            server.http.post(CHAT, json=json.loads(line("x"))["body"] | {"n": 4})
        )
        while len(server.engine.requests) < 24:
            await asyncio.sleep(0.01)
        server.engine.held = False
        assert (await asking).status_code == 200
        batch = await server.until(made["id"])
        assert batch["request_counts"]["completed"] == 30


async def test_no_more_sequences_run_than_batches_may_have(tmp_path: Path):
    async with batch_server(tmp_path, batch_concurrency=5) as server:
        server.engine.held = True
        server.run_batches()
        content = "".join(line(str(index), n=2) for index in range(10))
        made = await server.create(content)
        while len(server.engine.requests) < 4:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert len(server.engine.requests) == 4, "two lines of two; a third would be six"
        server.engine.held = False
        assert (await server.until(made["id"]))["status"] == "completed"


async def test_lines_wait_while_there_is_no_engine(server: BatchServer):
    ready, server.engine.ready = server.engine.ready, None
    server.run_batches()
    made = await server.create(line("a"))
    await server.until(made["id"], lambda batch: batch["status"] == "in_progress")
    await asyncio.sleep(0.1)
    assert (await server.batch(made["id"]))["status"] == "in_progress"
    server.engine.ready = ready
    assert (await server.until(made["id"]))["request_counts"]["completed"] == 1


async def test_lines_that_were_with_an_engine_that_died_run_again_one_at_a_time(
    server: BatchServer,
):
    server.engine.held = True
    server.run_batches()
    made = await server.create("".join(line(str(index)) for index in range(4)))
    while len(server.engine.requests) < 4:
        await asyncio.sleep(0.01)
    ready, server.engine.ready = server.engine.ready, None
    assert ready is not None
    while server.engine.num_open:
        await asyncio.sleep(0.01)
    server.engine.ready = replace(ready, epoch=2)
    most = 0
    while len(server.engine.requests) < 8:
        most = max(most, server.engine.num_open)
        server.engine.held = server.engine.num_open == 0
        await asyncio.sleep(0.01)
    server.engine.held = False
    assert most == 1
    assert (await server.until(made["id"]))["request_counts"]["completed"] == 4


def contains(tokens: list[int], part: list[int]) -> bool:
    return any(tokens[i : i + len(part)] == part for i in range(len(tokens)))


async def test_a_line_on_which_the_engine_fails_again_and_again_fails(server: BatchServer):
    server.engine.fail_after = 0
    poison = server.state.tokenizer.encode("poison")
    server.engine.failing = lambda request: contains(request.tokens, poison)
    server.run_batches()
    made = await server.create(line("a") + line("poison") + line("b"))
    batch = await server.until(made["id"])
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    (record,) = await server.records(batch["error_file_id"])
    assert record["custom_id"] == "poison"
    assert record["response"]["status_code"] == 500
    assert record["response"]["body"]["error"]["code"] == "engine_error"
    asked = [request for request in server.engine.requests if contains(request.tokens, poison)]
    assert len(asked) == 3


async def test_failures_are_remembered_by_the_next_server(tmp_path: Path):
    async with batch_server(tmp_path) as server:
        made = await server.create(line("a"))
        for expected in (1, 2):
            assert server.store.note_failure(made["id"], 1) == expected
    async with batch_server(tmp_path) as server:
        server.engine.fail_after = 0
        server.run_batches()
        batch = await server.until(made["id"])
        assert batch["request_counts"]["failed"] == 1
        assert len(server.engine.requests) == 1
        assert server.store.failures(made["id"]) == {}


async def test_two_servers_on_one_directory_run_each_line_once(tmp_path: Path):
    async with batch_server(tmp_path) as first, batch_server(tmp_path) as second:
        first.run_batches()
        second.run_batches()
        made = [await second.create(line("a") * 1 + line("b")) for _ in range(4)]
        for batch in made:
            assert (await second.until(batch["id"]))["request_counts"]["completed"] == 2
        asked = (len(first.engine.requests), len(second.engine.requests))
        assert sorted(asked) == [0, 8]
        # The other one goes on when the first has gone.
        busy, idle = (first, second) if asked[0] else (second, first)
        await busy.stop()
        more = await busy.create(line("c"))
        assert (await busy.until(more["id"]))["status"] == "completed"
        assert len(idle.engine.requests) == 1


async def test_a_large_batch_of_one_key_does_not_hold_up_another_key(tmp_path: Path):
    keys = ("first", "second")
    async with batch_server(tmp_path, key="first", api_keys=keys, batch_concurrency=1) as server:
        large = [await server.create("".join(map(line, "abcdefghijklmnopqrst"))) for _ in range(9)]
        server.http.headers["authorization"] = "Bearer second"
        small = await server.create(line("x"))
        server.run_batches()
        await server.until(small["id"])
        server.http.headers["authorization"] = "Bearer first"
        states = [(await server.batch(batch["id"]))["status"] for batch in large]
        assert "in_progress" in states
        assert "validating" in states


async def test_lines_leave_the_latencies_in_the_metrics_alone(server: BatchServer):
    server.run_batches()
    await server.until((await server.create(line("a") + line("b", n=0)))["id"])
    text = server.state.metrics.render().decode()
    for outcome in ("completed", "failed"):
        assert f'batch_lines_total{{model_name="model",outcome="{outcome}"}} 1.0' in text
    counts = [
        row for row in text.splitlines() if row.startswith("wavefill_e2e") and "_count" in row
    ]
    assert [row.rsplit(" ")[-1] for row in counts] == ["0.0"]


@pytest.mark.parametrize(
    ("running", "waiting", "pending", "room"),
    [(0, 0, 0, True), (0, 1, 0, False), (64, 0, 0, False), (0, 0, 64, False), (63, 0, 0, True)],
)
async def test_lines_wait_while_others_need_the_engine(
    server: BatchServer, running: int, waiting: int, pending: int, room: bool
):
    stats = replace(server.engine.stats, running=running, waiting=waiting)

    class Client:
        ready = server.engine.ready

    Client.stats, Client.pending = stats, pending  # type: ignore[attr-defined]
    slots = BatchSlots(Client(), 8)  # type: ignore[arg-type]
    if room:
        assert await slots.acquire(1) == 1
        return
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(slots.acquire(1), 0.1)
    Client.stats = replace(stats, running=0, waiting=0)  # type: ignore[attr-defined]
    Client.pending = 0  # type: ignore[attr-defined]
    assert await slots.acquire(1) == 1


async def test_a_line_whose_grammar_ends_every_process_that_tries_it_fails_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[bytes] = []

    def die(self: GrammarChecker, start: object, line: bytes) -> None:
        asked.append(line)
        raise process_lost("tries grammars")

    monkeypatch.setattr(GrammarChecker, "_ask", die)
    async with batch_server(tmp_path) as server:
        server.run_batches()
        form = {"structured_outputs": {"regex": "a"}}
        batch = await server.until((await server.create(line("a") + line("b", **form)))["id"])
        assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        (record,) = await server.records(batch["error_file_id"])
        assert record["response"]["status_code"] == 503 and len(asked) == MAX_FAILURES
