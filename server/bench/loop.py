"""The two ways to load a server: a fixed concurrency, or a fixed rate of arrivals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from server.bench.client import BenchClient
from server.bench.metrics import Failure, Outcome
from server.bench.workload import Workload, poisson_arrivals


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
