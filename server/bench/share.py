"""`python -m server.bench.share`: one of several processes that load a server together.

One process reads some 100,000 tokens a second; a fast server with many clients sends more.  Each of
N processes sends every N-th request.  A process reads one line of JSON (a `Share`) from stdin, says
that it is ready, waits for a second line with the time to begin, and writes a `ShareResult` as
MessagePack.  Times are `time.perf_counter()`, which all processes of one host share.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec

from server.bench.client import BenchClient
from server.bench.loop import Load, Run
from server.bench.metrics import Failure, RequestResult
from server.bench.workload import Workload

T = TypeVar("T")

START_SECONDS = 0.05  # from the start message to the first request, so that all processes have it


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one process does of a run."""

    base_url: str
    api_key: str | None
    timeout_s: float
    workload: Workload
    first: int  # of its requests; then every `step`-th
    step: int
    count: int  # of all requests of the run
    concurrency: int  # its own clients, in a closed loop
    rate: float | None  # of all processes together, in an open loop


class ShareResult(msgspec.Struct, frozen=True, array_like=True):
    answers: list[RequestResult]
    failures: list[Failure]
    lag_s: float


def shares(whole: Share, processes: int) -> list[Share]:
    """Split a run for at most `processes`: each has at least one client and one request."""
    most = whole.count if whole.rate is not None else min(whole.count, whole.concurrency)
    number = min(processes, most)
    clients, more = divmod(whole.concurrency, number)
    return [
        msgspec.structs.replace(
            whole, first=place, step=number, concurrency=clients + (place < more)
        )
        for place in range(number)
    ]


def run_together(parts: list[Share]) -> Run:
    """The outcomes of all parts, each run by a process of its own."""
    command = [sys.executable, "-m", "server.bench.share"]
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        workers = [
            stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe)) for _ in parts
        ]
        for worker in workers:
            stack.callback(worker.kill)
        for worker, part in zip(workers, parts, strict=True):
            _send_line(worker, msgspec.json.encode(part))
        for worker in workers:
            assert worker.stdout is not None
            if not worker.stdout.readline():
                raise RuntimeError("a process of the benchmark ended before it began")
        began = msgspec.json.encode(time.perf_counter() + START_SECONDS)
        for worker in workers:
            _send_line(worker, began)
        results = [_result(worker) for worker in workers]
    outcomes = [outcome for result in results for outcome in (*result.answers, *result.failures)]
    return Run(outcomes, max(result.lag_s for result in results))


def _send_line(worker: subprocess.Popen[bytes], line: bytes) -> None:
    assert worker.stdin is not None
    worker.stdin.write(line + b"\n")
    worker.stdin.flush()


def _result(worker: subprocess.Popen[bytes]) -> ShareResult:
    assert worker.stdout is not None
    data = worker.stdout.read()
    if worker.wait() != 0:
        raise RuntimeError(f"a process of the benchmark ended with code {worker.returncode}")
    return msgspec.msgpack.decode(data, type=ShareResult)


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run(), on the faster event loop where it is installed."""
    try:
        from uvloop import new_event_loop
    except ImportError:  # there is none for Windows
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


async def run_share(share: Share, load: Load, began: float) -> Run:
    await asyncio.sleep(max(0.0, began - time.perf_counter()))
    indices = range(share.first, share.count, share.step)
    if share.rate is None:
        return await load.closed(indices, share.concurrency)
    return await load.open(indices, share.rate, began)


async def _main() -> None:
    share = msgspec.json.decode(sys.stdin.buffer.readline(), type=Share)
    async with BenchClient(share.base_url, share.api_key, share.timeout_s) as client:
        load = Load(client, share.workload, lambda: None)
        sys.stdout.buffer.write(b"ready\n")
        sys.stdout.buffer.flush()
        began = msgspec.json.decode(sys.stdin.buffer.readline(), type=float)
        run = await run_share(share, load, began)
    answers = [outcome for outcome in run.outcomes if isinstance(outcome, RequestResult)]
    failures = [outcome for outcome in run.outcomes if isinstance(outcome, Failure)]
    sys.stdout.buffer.write(msgspec.msgpack.encode(ShareResult(answers, failures, run.lag_s)))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    run_loop(_main())
