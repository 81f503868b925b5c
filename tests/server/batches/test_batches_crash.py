"""A server that dies between two writes loses no line of a batch and runs none of them twice."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server.batches import results
from server.batches.database import BatchDatabase
from server.batches.results import BatchResult, BatchResults
from tests.support.server.batch_server import ENDED, BatchServer, batch_server, line

NAMES = [f"a{index}" for index in range(6)]
BAD = "wrong"  # a line that its route refuses
CONTENT = "".join(line(name) for name in NAMES) + line(BAD, temperature=9)


class Killed(BaseException):
    """The process is no more: nothing that it would have done afterwards happens."""


class Killer:
    """Counts what reaches the disk, and ends everything at one of these moments."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int) -> None:
        self._at = at
        self.count = 0
        self.dead = False
        commit, write, unlink = BatchDatabase.commit, results.append, Path.unlink

        def killing(do: Callable[..., Any], torn: Callable[..., Any] | None = None):
            def wrapped(*arguments: Any, **options: Any) -> Any:
                self._step(None)
                if torn is not None:
                    self._step(lambda: torn(*arguments))
                return do(*arguments, **options)

            return wrapped

        def half(path: Path, data: bytes) -> None:
            write(path, data[: len(data) // 2])

        patch.setattr(BatchDatabase, "commit", killing(commit))
        patch.setattr(results, "append", killing(write, half))
        patch.setattr(Path, "unlink", killing(unlink))

    def _step(self, last_deed: Callable[[], None] | None) -> None:
        if self.dead:
            raise Killed
        if self.count == self._at:
            self.dead = True
            if last_deed is not None:
                last_deed()
            raise Killed
        self.count += 1


def answered(server: BatchServer) -> list[str]:
    """The names of the lines that the engine was asked about, in order."""
    decode = server.state.tokenizer.decode
    return [
        decode(request.tokens, skip_special=False).split("<|user|>")[1].split("<|end|>")[0]
        for request in server.engine.requests
    ]


async def run_until_killed(folder: Path, id: str, at: int) -> tuple[bool, list[str]]:
    """Whether the process died, and which lines its engine answered."""
    with pytest.MonkeyPatch.context() as patch:
        async with batch_server(folder) as server:
            killer = Killer(patch, at)
            server.run_batches()
            while not killer.dead and (await server.batch(id))["status"] not in ENDED:
                await asyncio.sleep(0.003)
            await server.stop()
            return killer.dead, answered(server)


def lines_on_disk(folder: Path) -> set[str]:
    """The names of the lines whose records are whole on the disk."""
    found = set()
    for path in (folder / "data" / "files").iterdir():
        for raw in path.read_text().splitlines(keepends=True):
            if raw.endswith("\n") and '"batch_req_' in raw:
                found.add(raw.split('"custom_id":"')[1].split('"')[0])
    return found


async def check_the_end(folder: Path, id: str, status: str, before: set[str]) -> None:
    """A server that does not die ends the batch, and runs nothing that is on the disk."""
    async with batch_server(folder) as server:
        server.run_batches()
        batch = await server.until(id)
        assert batch["status"] == status
        good = await server.records(batch["output_file_id"])
        bad = await server.records(batch["error_file_id"])
        assert sorted(record["custom_id"] for record in good + bad) == sorted([*NAMES, BAD])
        counts = {"total": 7, "completed": len(good), "failed": len(bad)}
        assert batch["request_counts"] == counts
        assert batch["usage"]["input_tokens"] == sum(
            record["response"]["body"]["usage"]["prompt_tokens"] for record in good
        )
        assert before.isdisjoint(answered(server))
        await server.stop()
        server.store.files.sweep()
        files = (await server.http.get("/v1/files")).json()["data"]
        on_disk = {path.name: path.stat().st_size for path in (folder / "data/files").iterdir()}
        assert {file["id"]: file["bytes"] for file in files} == on_disk


async def make(folder: Path, *, cancelled: bool = False) -> str:
    async with batch_server(folder) as server:
        made = await server.create(CONTENT)
        if cancelled:
            server.engine.held = True
            server.run_batches()
            await server.until(made["id"], lambda batch: batch["status"] == "in_progress")
            await server.stop()
            await server.http.post(f"/v1/batches/{made['id']}/cancel")
        return made["id"]


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_batch_goes_on_from_any_write_at_which_its_server_died(
    tmp_path: Path, cancelled: bool
):
    at, died = 0, True
    while died:
        folder = tmp_path / str(at)
        folder.mkdir()
        id = await make(folder, cancelled=cancelled)
        died, _ = await run_until_killed(folder, id, at)
        before = lines_on_disk(folder)
        status = "cancelled" if cancelled else "completed"
        await check_the_end(folder, id, status, before)
        at += 1
    assert at > 5


async def test_a_batch_ends_although_its_server_dies_again_and_again(tmp_path: Path):
    id = await make(tmp_path)
    asked: list[str] = []
    for at in [*range(1, 7), 10**9]:
        before = lines_on_disk(tmp_path)
        _, names = await run_until_killed(tmp_path, id, at)
        assert before.isdisjoint(names)
        asked += names
    assert set(asked) == set(NAMES)
    await check_the_end(tmp_path, id, "completed", set(NAMES))


@pytest.mark.parametrize(
    "tail",
    [
        b'{"id":"batch_req_x_2","custom_id":"b","resp',
        b'{"id":"batch_req_x_2","custom_id":"b","response":null,"error":null}',  # no end of line
        b"\0" * 300,
        b"\n",
        b"[]\n",
        b'{"id":null,"custom_id":"b","response":null,"error":null}\n',
        b'{"id":"batch_req_x_1","custom_id":"a","response":null,"error":null}\n',  # once more
    ],
)
def test_a_torn_end_is_cut_off_and_written_again(tmp_path: Path, tail: bytes):
    output, errors = tmp_path / "output", tmp_path / "errors"
    first, second = (
        BatchResult(n, "ab"[n - 1], 200, b'{"usage":{"total_tokens":4}}') for n in (1, 2)
    )
    BatchResults("batch_x", output, errors).write([first])
    whole = output.read_bytes()
    with output.open("ab") as file:
        file.write(tail)
    again = BatchResults("batch_x", output, errors)
    again.recover()
    assert output.read_bytes() == whole
    assert again.totals.done == {1}
    again.write([second])
    assert again.totals.usage().total_tokens == 8
    assert len(output.read_bytes().splitlines()) == 2


async def test_a_full_disk_stops_a_batch_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("server.batches.runner.PAUSE_SECONDS", 0.01)
    write, broken = results.append, [True]

    def full(path: Path, data: bytes) -> None:
        if broken[0]:
            write(path, data[:40])
            raise OSError(28, os.strerror(28))
        write(path, data)

    monkeypatch.setattr(results, "append", full)
    async with batch_server(tmp_path) as server:
        made = await server.create(CONTENT)
        server.run_batches()
        while len(server.engine.requests) < 20:
            await asyncio.sleep(0.01)
        assert (await server.batch(made["id"]))["status"] == "in_progress"
        broken[0] = False
        batch = await server.until(made["id"])
        assert batch["request_counts"] == {"total": 7, "completed": 6, "failed": 1}
        assert len(await server.records(batch["output_file_id"])) == 6
