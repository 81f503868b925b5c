"""One run against one server: its requests, sent by one process or several, and their summary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from server.bench.client import BenchClient, ServerError
from server.bench.share import Load, Run, Share, run_together, shares
from server.bench.workload import Workload


@dataclass(frozen=True)
class Measurement:
    """What is sent to one server; `concurrency` is of a closed loop, `rate` of an open one."""

    base_url: str
    api_key: str | None
    timeout_s: float
    workload: Workload
    num_prompts: int
    concurrency: int
    rate: float | None
    processes: int

    def client(self) -> BenchClient:
        return BenchClient(self.base_url, self.api_key, self.timeout_s)

    def at(
        self, *, concurrency: int, rate: float | None, num_prompts: int, turn: int
    ) -> Measurement:
        """The same with another load; each `turn` has prompts that no other has."""
        workload = replace(self.workload, seed=self.workload.seed + turn)
        return replace(
            self, concurrency=concurrency, rate=rate, num_prompts=num_prompts, workload=workload
        )

    async def warm_up(self, client: BenchClient, count: int) -> None:
        """Raises ServerError if a request fails."""
        load = Load(client, self.workload, lambda: None)
        if failure := await load.warm_up(count, self.concurrency):
            raise ServerError(f"warm-up: {failure.kind}: {failure.message}")

    async def run(self, client: BenchClient, on_finished: Callable[[], None]) -> Run:
        """`on_finished` is called after each request, if this process sends them."""
        whole = Share(
            base_url=self.base_url,
            api_key=self.api_key,
            timeout_s=self.timeout_s,
            workload=self.workload,
            indices=range(self.num_prompts),
            concurrency=self.concurrency,
            rate=self.rate,
        )
        split = shares(whole, self.processes)
        if len(split) > 1:
            return await asyncio.to_thread(run_together, split)
        return await whole.run(Load(client, self.workload, on_finished), time.perf_counter())
