"""Batches from their making to their end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from runtime.messages import BACKGROUND
from server.batches.background import ENDPOINTS
from tests.support.server.batch_server import CHAT, BatchServer, FakeClock, batch_server, line

DAY = 86400


async def test_a_batch_answers_every_line_as_its_route_would(server: BatchServer):
    server.run_batches()
    made = await server.create(
        "\ufeff" + "".join(line(f"a{index}") for index in range(40)).replace("\n", "\r\n"),
        metadata={"job": "nightly"},
    )
    assert made["status"] == "validating"
    assert made["expires_at"] == made["created_at"] + DAY
    batch = await server.until(made["id"])
    assert (batch["status"], batch["model"]) == ("completed", "fake")
    assert batch["metadata"] == {"job": "nightly"}
    assert batch["request_counts"] == {"total": 40, "completed": 40, "failed": 0}
    assert batch["error_file_id"] is None
    records = await server.records(batch["output_file_id"])
    assert {record["custom_id"] for record in records} == {f"a{index}" for index in range(40)}
    assert len({record["id"] for record in records}) == 40
    direct = await server.http.post(CHAT, json=json.loads(line("a1"))["body"])
    for record in records:
        assert set(record) == {"id", "custom_id", "response", "error"}
        assert record["error"] is None
        assert set(record["response"]) == {"status_code", "request_id", "body"}
        assert record["response"]["body"]["choices"] == direct.json()["choices"]
        request_id = record["response"]["request_id"]
        by_id = (await server.http.get(f"/v1/requests/{request_id}")).json()
        assert (by_id["request_id"], by_id["state"]) == (request_id, "finished")
        assert record["response"]["body"]["id"] == f"chatcmpl-{by_id['id']}"
    tokens = sum(record["response"]["body"]["usage"]["total_tokens"] for record in records)
    assert batch["usage"]["total_tokens"] == tokens > 0


async def test_openais_client_runs_a_batch(server: BatchServer):
    server.run_batches()
    client = AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=server.http
    )
    file = await client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    made = await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    await server.until(made.id)
    batch = await client.batches.retrieve(made.id)
    assert batch.status == "completed"
    assert batch.in_progress_at is not None is not batch.finalizing_at
    assert batch.completed_at is not None
    assert batch.output_file_id is not None
    output = await client.files.retrieve(batch.output_file_id)
    assert (output.purpose, output.filename) == ("batch_output", f"{made.id}_output.jsonl")
    assert output.expires_at == output.created_at + 7200
    assert json.loads((await client.files.content(output.id)).text)["custom_id"] == "a"
    assert [batch.id async for batch in client.batches.list(limit=1)] == [made.id]


BODIES: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/embeddings": {"input": "Hi"},
}


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_lines_may_go_to_every_endpoint_that_batches_know(server: BatchServer, endpoint: str):
    server.run_batches()
    body = {"model": "fake"} | BODIES[endpoint]
    whole = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
    batch = await server.until((await server.create(json.dumps(whole), endpoint))["id"])
    (record,) = await server.records(batch["output_file_id"] or batch["error_file_id"])
    assert record["response"]["status_code"] == 200, record
    assert batch["usage"]["input_tokens"] > 0
    assert {request.priority for request in server.engine.requests} == {BACKGROUND}


@pytest.mark.parametrize("store", [None, False, True])
async def test_a_lines_response_is_stored_only_if_it_says_so(
    server: BatchServer, store: bool | None
):
    server.run_batches()
    fields = {} if store is None else {"store": store}
    body = {"model": "fake", "input": "Hi"} | fields
    whole = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    batch = await server.until((await server.create(json.dumps(whole), "/v1/responses"))["id"])
    (record,) = await server.records(batch["output_file_id"])
    response = record["response"]["body"]
    assert response["store"] is bool(store)
    kept = await server.http.get(f"/v1/responses/{response['id']}")
    assert kept.status_code == (200 if store else 404)


@pytest.mark.parametrize("keys", [("first",), ("first", "second")])
@pytest.mark.parametrize(("route", "asked"), [(CHAT, "messages"), ("/v1/responses", "input")])
async def test_what_a_line_stores_belongs_to_the_key_of_its_batch(
    tmp_path: Path, keys: tuple[str, ...], route: str, asked: str
):
    said = [{"role": "user", "content": "Hi"}]
    whole = {"custom_id": "a", "method": "POST", "url": route}
    whole["body"] = {"model": "fake", asked: said, "store": True}
    async with batch_server(tmp_path, key="first", api_keys=keys) as server:
        server.run_batches()
        batch = await server.until((await server.create(json.dumps(whole), route))["id"])
        (record,) = await server.records(batch["output_file_id"])
        path = f"{route}/{record['response']['body']['id']}"
        for key in keys:
            found = await server.http.get(path, headers={"authorization": f"Bearer {key}"})
            assert found.status_code == (200 if key == "first" else 404)


async def test_pages_of_batches_hold_each_once_the_newest_first(server: BatchServer):
    made = [(await server.create(line("a")))["id"] for _ in range(5)]
    seen: list[str] = []
    query: dict[str, str] = {"limit": "2"}
    while True:
        page = (await server.http.get("/v1/batches", params=query)).json()
        seen += [batch["id"] for batch in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert seen == made[::-1]


async def test_batches_belong_to_the_key_that_made_them(tmp_path: Path):
    keys = ("first", "second")
    async with batch_server(tmp_path, key="first", api_keys=keys) as server:
        server.run_batches()
        made = await server.create(line("a"))
        other = {"authorization": "Bearer second"}
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = await server.http.request(
                method, f"/v1/batches/{made['id']}{path}", headers=other
            )
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "batch_not_found")
        assert (await server.http.get("/v1/batches", headers=other)).json()["data"] == []
        batch = await server.until(made["id"])
        path = f"/v1/files/{batch['output_file_id']}/content"
        assert (await server.http.get(path)).status_code == 200
        assert (await server.http.get(path, headers=other)).status_code == 404
        # Its prefixes are those of its key, as if it had asked itself.
        mine = server.engine.requests[0].salt
        for key, same in (("first", True), ("second", False)):
            body = json.loads(line("a"))["body"]
            headers = {"authorization": f"Bearer {key}"}
            await server.http.post(CHAT, json=body, headers=headers)
            assert (server.engine.requests[-1].salt == mine) is same


async def test_a_cancelled_batch_keeps_what_was_answered_and_names_the_rest(tmp_path: Path):
    async with batch_server(tmp_path, batch_concurrency=3) as server:
        server.run_batches()
        made = await server.create("".join(line(str(index)) for index in range(200)))
        await server.until(made["id"], lambda batch: batch["request_counts"]["completed"] > 0)
        server.engine.held = True
        answer = await server.http.post(f"/v1/batches/{made['id']}/cancel")
        assert answer.json()["status"] == "cancelling"
        batch = await server.until(made["id"])
        assert batch["status"] == "cancelled"
        assert batch["cancelled_at"] is not None is not batch["cancelling_at"]
        good = await server.records(batch["output_file_id"])
        rest = await server.records(batch["error_file_id"])
        assert {record["error"]["code"] for record in rest} == {"batch_cancelled"}
        names = [record["custom_id"] for record in good + rest]
        assert sorted(names, key=int) == [str(index) for index in range(200)]
        assert 0 < len(good) < 200
        assert server.engine.num_open == 0, "nothing of it runs on"
        again = await server.http.post(f"/v1/batches/{made['id']}/cancel")
        assert again.json()["status"] == "cancelled"


async def test_a_batch_that_waits_can_be_cancelled_before_anybody_looks_at_it(
    server: BatchServer,
):
    made = await server.create("no JSON at all")
    await server.http.post(f"/v1/batches/{made['id']}/cancel")
    server.run_batches()
    batch = await server.until(made["id"])
    assert batch["status"] == "cancelled"
    assert batch["output_file_id"] is None is batch["error_file_id"]


async def test_a_batch_that_has_ended_cannot_be_cancelled(server: BatchServer):
    server.run_batches()
    made = await server.create(line("a"))
    await server.until(made["id"])
    answer = await server.http.post(f"/v1/batches/{made['id']}/cancel")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "batch_not_cancellable"
    assert "completed" in answer.json()["error"]["message"]


async def test_a_batch_that_takes_too_long_expires_with_what_it_has(tmp_path: Path):
    clock = FakeClock()
    async with batch_server(tmp_path, clock=clock, batch_concurrency=2) as server:
        server.run_batches()
        made = await server.create("".join(line(str(index)) for index in range(100)))
        await server.until(made["id"], lambda batch: batch["request_counts"]["completed"] > 0)
        server.engine.held = True
        clock.now += DAY
        batch = await server.until(made["id"])
        assert (batch["status"], batch["expired_at"]) == ("expired", int(clock.now))
        counts = batch["request_counts"]
        assert counts["completed"] + counts["failed"] == counts["total"] == 100
        rest = await server.records(batch["error_file_id"])
        assert len(rest) == counts["failed"] > 0
        assert {record["error"]["code"] for record in rest} == {"batch_expired"}


async def test_a_batch_that_expired_while_no_server_ran_runs_nothing(tmp_path: Path):
    clock = FakeClock()
    async with batch_server(tmp_path, clock=clock) as server:
        made = await server.create(line("a"))
    clock.now += 2 * DAY
    async with batch_server(tmp_path, clock=clock) as server:
        server.run_batches()
        batch = await server.until(made["id"])
        assert (batch["status"], batch["request_counts"]["failed"]) == ("expired", 1)
        assert server.engine.requests == []


async def test_a_batch_stops_where_the_room_for_files_ends(tmp_path: Path):
    async with batch_server(tmp_path, max_data_bytes=30_000, batch_concurrency=2) as server:
        server.engine.delay = 0.0005
        server.run_batches()
        made = await server.create("".join(line(str(index)) for index in range(100)))
        batch = await server.until(made["id"])
        assert batch["status"] == "completed"
        rest = await server.records(batch["error_file_id"])
        assert {record["error"]["code"] for record in rest} == {"storage_full"}
        assert "--max-data-bytes" in rest[0]["error"]["message"]
        counts = batch["request_counts"]
        assert counts["completed"] + counts["failed"] == 100
        files = {"file": ("a", b"x" * 1000)}
        answer = await server.http.post("/v1/files", data={"purpose": "batch"}, files=files)
        assert answer.status_code == 429
        assert "delete files" in answer.json()["error"]["message"]


async def test_the_input_of_a_batch_stays_until_its_end(server: BatchServer):
    made = await server.create(line("a"))
    path = f"/v1/files/{made['input_file_id']}"
    answer = await server.http.delete(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "file_in_use")
    assert made["id"] in answer.json()["error"]["message"]
    server.clock.now += 31 * DAY
    server.store.files.sweep()
    assert server.store.files.path(made["input_file_id"]).exists()
    server.clock.now -= 31 * DAY
    server.run_batches()
    await server.until(made["id"])
    assert (await server.http.delete(path)).json()["deleted"]


async def test_an_input_file_that_is_missing_on_disk_fails_the_batch(server: BatchServer):
    made = await server.create(line("a"))
    server.store.files.path(made["input_file_id"]).unlink()
    server.run_batches()
    batch = await server.until(made["id"])
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["code"] == "file_not_found"
