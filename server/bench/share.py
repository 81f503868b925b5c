"""The two ways to load a server, a fixed concurrency and a fixed rate, by one process or several.

One process reads some 100,000 tokens a second; a fast server with many clients sends more.  Each of
N processes sends every N-th request.  Times are `time.perf_counter()`, which all processes of one
host share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from server.bench.client import BenchClient
from server.bench.metrics import Failure, Outcome
from server.bench.workload import Workload, poisson_arrivals

T = TypeVar("T")

START_SECONDS = 0.05  # from the start message to the first request, so that all processes have it


@dataclass(frozen=True)
class Run:
    outcomes: list[Outcome]
    lag_s: float  # the largest delay of a request after it was due; 0 in a closed loop


class Load:
    """Sends the requests of one workload.  `on_finished` is called at the end of each."""

    def __init__(
        self, client: BenchClient, workload: Workload, on_finished: Callable[[], None]
    ) -> None:
        self._client = client
        self._workload = workload
        self._on_finished = on_finished

    async def warm_up(self, count: int, concurrency: int) -> Failure | None:
        """Send requests that are not measured; what the first failure was, if there was one."""
        outcomes = (await self.closed(range(count), concurrency, "warm-up")).outcomes
        return next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)

    async def closed(self, indices: range, concurrency: int, stage: str = "measured") -> Run:
        """`concurrency` clients; each sends its next request when its last one was answered."""
        outcomes: list[Outcome] = []
        remaining = iter(indices)

        async def worker() -> None:
            for index in remaining:
                body = self._workload.body(index, stage)
                outcomes.append(await self._send(body, time.perf_counter()))

        await asyncio.gather(*(worker() for _ in range(min(concurrency, len(indices)))))
        return Run(outcomes, 0.0)

    async def open(self, indices: range, rate: float, began: float) -> Run:
        """`rate` arrivals a second whatever the server does, with exponential gaps from `began` on.

        Of the arrivals of all processes, those of `indices` are sent here.
        """
        bodies = [self._workload.body(index) for index in indices]
        tasks: list[asyncio.Task[Outcome]] = []
        lag = 0.0
        arrivals = list(poisson_arrivals(rate, indices.stop, self._workload.seed))
        for body, due in zip(bodies, arrivals[indices.start :: indices.step], strict=True):
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            lag = max(lag, time.perf_counter() - began - due)
            tasks.append(asyncio.create_task(self._send(body, began + due)))
        return Run(list(await asyncio.gather(*tasks)), lag)

    async def _send(self, body: dict[str, object], start: float) -> Outcome:
        outcome = await self._client.ask(self._workload, body, start)
        self._on_finished()
        return outcome


@dataclass(frozen=True)
class Share:
    """The requests of a run that one process sends."""

    base_url: str
    api_key: str | None
    timeout_s: float
    workload: Workload
    indices: range  # of its requests among those of the run
    concurrency: int  # its own clients, in a closed loop
    rate: float | None  # of all processes together, in an open loop

    async def run(self, load: Load, began: float) -> Run:
        await asyncio.sleep(max(0.0, began - time.perf_counter()))
        if self.rate is None:
            return await load.closed(self.indices, self.concurrency)
        return await load.open(self.indices, self.rate, began)


def shares(whole: Share, processes: int) -> list[Share]:
    """Split a run for at most `processes`: each has at least one client and one request."""
    count = len(whole.indices)
    number = min(processes, count if whole.rate is not None else min(count, whole.concurrency))
    clients, more = divmod(whole.concurrency, number)
    return [
        replace(whole, indices=whole.indices[i::number], concurrency=clients + (i < more))
        for i in range(number)
    ]


def run_together(split: list[Share]) -> Run:
    """The outcomes of all shares, each sent by a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes: list[Connection[Any, Any]] = []
        for share in split:
            ours, theirs = context.Pipe()
            worker = context.Process(target=_work, args=(share, theirs), daemon=True)
            worker.start()
            theirs.close()  # only the worker holds it: reading ends if that dies
            stack.callback(worker.kill)
            pipes.append(ours)
        try:
            for pipe in pipes:
                pipe.recv()  # it is ready
            began = time.perf_counter() + START_SECONDS
            for pipe in pipes:
                pipe.send(began)
            runs: list[Run] = [pipe.recv() for pipe in pipes]
        except (EOFError, ConnectionError):
            raise RuntimeError(
                "a process of the benchmark ended before its share was done"
            ) from None
    return Run(
        [outcome for run in runs for outcome in run.outcomes], max(run.lag_s for run in runs)
    )


def _work(share: Share, pipe: Connection[Any, Any]) -> None:
    """What a process of run_together does; it is sent the time to begin, and sends its Run."""

    async def run() -> Run:
        async with BenchClient(share.base_url, share.api_key, share.timeout_s) as client:
            pipe.send("ready")
            return await share.run(Load(client, share.workload, lambda: None), pipe.recv())

    pipe.send(run_loop(run()))


def run_loop(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run(), on the faster event loop where it is installed."""
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return asyncio.run(work)
    return uvloop.run(work)
