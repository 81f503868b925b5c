"""What runs beside requests, and which no request would show to have failed."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest

from server.process import api_process
from server.process.api_process import BackgroundWork


class Work:
    """A reporter or a runner of batches that is over at once."""

    def __init__(self, *arguments: object, **options: object) -> None:
        pass

    async def run(self) -> None:
        raise ValueError("no version")


class EndlessWork(Work):
    async def run(self) -> None:
        await asyncio.Event().wait()


def background_work(monkeypatch: pytest.MonkeyPatch, work: type[Work]) -> BackgroundWork:
    for name in ("Reporter", "BatchRunner"):
        monkeypatch.setattr(api_process, name, work)
    monkeypatch.setattr(api_process, "line_app", lambda state: None)
    args: Any = mock.Mock(index=0)
    return BackgroundWork(args, mock.Mock())


async def test_work_that_fails_says_so_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    background_work(monkeypatch, Work).start()
    await asyncio.sleep(0.01)
    said = sorted(record.getMessage() for record in caplog.records)
    assert said == [
        "the runner of batches has failed; the server goes on without it",
        "the start report has failed; the server goes on without it",
    ]
    assert caplog.text.count("ValueError: no version") == 2


async def test_work_that_ends_with_the_server_says_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    work = background_work(monkeypatch, EndlessWork)
    work.start()
    await asyncio.sleep(0.01)
    await work.close()
    await asyncio.sleep(0.01)
    assert not caplog.records
