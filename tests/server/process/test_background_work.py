"""What runs beside requests, and which no request would show to have failed."""

from __future__ import annotations

import asyncio

import pytest

from server.process.api_process import log_failure


async def ended(work: asyncio.Future[None], *, cancel: bool = False) -> asyncio.Task[None]:
    async def run() -> None:
        await work

    task = asyncio.create_task(run())
    await asyncio.sleep(0)
    if cancel:
        task.cancel()
    await asyncio.wait([task])
    return task


async def test_a_task_that_fails_says_so_with_its_traceback(caplog: pytest.LogCaptureFixture):
    work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    work.set_exception(ValueError("no version"))
    log_failure(await ended(work), "the start report")
    [record] = caplog.records
    assert record.getMessage() == "the start report has failed; the server goes on without it"
    assert record.exc_info is not None and "no version" in str(record.exc_info[1])


async def test_a_task_that_ends_with_the_server_says_nothing(caplog: pytest.LogCaptureFixture):
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    log_failure(await ended(done), "the start report")
    log_failure(await ended(asyncio.get_running_loop().create_future(), cancel=True), "batches")
    assert not caplog.records
