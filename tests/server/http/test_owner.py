"""The owner of a request, the SHA-256 of its key, has all that the request makes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.support.server.batch_server import BatchServer, batch_server, line

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}], "store": True}
RESPONSE = {"model": "fake", "input": "Hi"}


@pytest.fixture(params=["secret", ""])
async def served(request: pytest.FixtureRequest, tmp_path: Path):
    """A server with that key or with none, and its owner."""
    key: str = request.param
    keys = (key, "other") if key else ()
    async with batch_server(tmp_path, key=key, api_keys=keys) as server:
        yield server, hashlib.sha256(key.encode()).digest() if key else b""


async def made(server: BatchServer) -> str:
    """A stored chat, a response and a batch whose line stores a chat; the id of the batch."""
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/responses", RESPONSE)):
        answer = await server.http.post(path, json=body, headers={"x-request-id": "mine"})
        assert answer.status_code == 200, answer.text
    server.run_batches()
    batch = await server.create(line("a", store=True))
    assert (await server.until(batch["id"]))["request_counts"]["completed"] == 1
    return batch["id"]


async def test_owners_are_stored_as_earlier_versions_did(served: tuple[BatchServer, bytes]):
    server, owner = served
    await made(server)
    rows = await server.state.responses.call(
        lambda database: database.connection.execute("SELECT id, owner FROM responses").fetchall()
    )
    chat = f"chat:{owner.hex()}".encode()
    assert sorted({(id.partition("_")[0][:4], stored) for id, stored in rows}) == [
        ("chat", chat),
        ("resp", owner),
    ]
    assert [stored for _, stored in rows].count(chat) == 2  # one of them is the line's
    with server.store.database.reading() as connection:
        for table in ("files", "batches"):
            stored = connection.execute(f"SELECT DISTINCT owner FROM {table}").fetchall()
            assert [tuple(row) for row in stored] == [(owner.hex(),)], table


async def test_all_that_a_request_made_is_its_owners_alone(served: tuple[BatchServer, bytes]):
    server, owner = served
    batch = await made(server)
    assert {request.salt for request in server.engine.requests} == {owner}
    paths = ["/v1/requests/mine", f"/v1/batches/{batch}"]
    file = (await server.batch(batch))["output_file_id"]
    paths += [f"/v1/files/{file}", f"/v1/files/{file}/content"]
    [record] = await server.records(file)
    paths += [f"/v1/requests/{record['response']['request_id']}"]
    paths += [f"/v1/chat/completions/{record['response']['body']['id']}"]
    for path in paths:
        assert (await server.http.get(path)).status_code == 200, path
    if owner:
        server.http.headers["authorization"] = "Bearer other"
        for path in paths:
            assert (await server.http.get(path)).status_code == 404, path
        for listing in ("/v1/files", "/v1/batches", "/v1/chat/completions"):
            assert (await server.http.get(listing)).json()["data"] == [], listing
        answer = await server.http.post(f"/v1/batches/{batch}/cancel")
        assert answer.status_code == 404
        assert (await server.http.delete(f"/v1/files/{file}")).status_code == 404
