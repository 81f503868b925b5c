"""/v1/files and /v1/batches on a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3

import pytest

from server.batches.database import BatchDatabase
from tests.support.server.batch_server import BatchServer


def no_space(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_commit(*arguments: object) -> None:
    raise sqlite3.OperationalError("database or disk is full")


@pytest.mark.parametrize("step", ["write", "sync", "commit"])
async def test_an_upload_to_a_full_disk_is_503_and_the_next_one_is_stored(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch, step: str
):
    with monkeypatch.context() as patch:
        if step == "write":
            patch.setattr("server.batches.upload._Upload.data", no_space)
        elif step == "sync":
            patch.setattr("os.fsync", no_space)
        else:
            patch.setattr(BatchDatabase, "commit", no_commit)
        files = {"file": ("in.jsonl", b"{}\n" * 1_000_000)}
        answer = await server.http.post("/v1/files", data={"purpose": "batch"}, files=files)
    assert answer.status_code == 503 and answer.headers["retry-after"] == "60"
    error = answer.json()["error"]
    assert error["code"] == "store_failed" and "--data-dir" in error["message"]
    assert await server.upload("{}\n")
    folder = server.store.database.directory / "files"
    while len(list(folder.iterdir())) > 1:
        await asyncio.sleep(0.01)


async def test_a_batch_on_a_full_disk_is_503(server: BatchServer, monkeypatch: pytest.MonkeyPatch):
    id = await server.upload("{}\n")
    body = {"input_file_id": id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    with monkeypatch.context() as patch:
        patch.setattr(BatchDatabase, "commit", no_commit)
        answers = [
            await server.http.post("/v1/batches", json=body),
            await server.http.delete(f"/v1/files/{id}"),
        ]
    assert [each.json()["error"]["code"] for each in answers] == ["store_failed"] * 2
    assert [each.status_code for each in answers] == [503] * 2
    assert (await server.http.post("/v1/batches", json=body)).status_code == 200
