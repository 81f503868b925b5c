"""KernelTimer: times split plans on a GPU with the real decode kernels, for tuning.py.

Calls are timed in CUDA graphs, back to back as layers are, over keys and values far larger than the
L2 cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch

from attention.backend import Shape
from attention.common.kernel_inputs import KernelInputs
from attention.dispatch import DECODE, Machine, dispatch
from attention.planned_kernel import PlannedKernel
from attention.planner.split_plan import HostSplitPlan, Int32Array, SplitPlan, SplitPlanSpec

GROUP, HEAD_DIM, PAGE = 8, 128, 16
DTYPE = torch.bfloat16
KV_BYTES = 2 << 30  # of keys, and as many of values: no call finds its own in the cache
MIN_SETS, CALLS, REPLAYS = 2, 24, 9

# One KV head is read, by as many CTAs per SM as serve a model with this many.
KV_HEADS = 8
SHAPE = Shape(
    heads=KV_HEADS * GROUP,
    kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    page_size=PAGE,
    dtype=DTYPE,
    kv_dtype=DTYPE,
)


def kernels_of(machine: Machine) -> list[str]:
    """The decode kernels of flash2 on the machine, for assigned and for queued plans.

    Raises UnsupportedAttention if there are none.
    """
    choices = (dispatch(machine, "flash2", SHAPE, planner) for planner in ("stream-k", "greedy"))
    return list(dict.fromkeys(choice.decode for choice in choices))


def follows(kernel: str, planner: str) -> bool:
    """Whether a decode kernel runs the plans of a planner."""
    planners = next(entry.planners for entry in DECODE if entry.name == kernel)
    return planners is None or planner in planners


class KernelTimer:
    """The current GPU, with keys and values of one KV head in shuffled pages."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(self.device)
        self.name, self.sms = properties.name, properties.multi_processor_count
        page_bytes = PAGE * HEAD_DIM * DTYPE.itemsize
        num_pages = min(KV_BYTES, properties.total_memory // 8) // page_bytes
        shape = (num_pages, 1, PAGE, HEAD_DIM)
        self.k = torch.randn(shape, device=self.device, dtype=DTYPE)
        self.v = torch.randn(shape, device=self.device, dtype=DTYPE)
        self.pages = torch.randperm(num_pages, device=self.device, dtype=torch.int32)
        self.stream = torch.cuda.Stream()

    def microseconds(
        self, kernel: PlannedKernel, plan: HostSplitPlan, spec: SplitPlanSpec, lengths: Int32Array
    ) -> float:
        """Median time of a call with this plan of rows of these lengths, over disjoint pages."""
        rows = len(lengths)
        tables = self._tables(lengths)
        q = torch.randn(rows, GROUP, HEAD_DIM, device=self.device, dtype=DTYPE)
        out = torch.empty_like(q)
        buffers = SplitPlan.allocate(
            spec,
            max_rows=rows,
            group=GROUP,
            head_dim=HEAD_DIM,
            queued=plan.queued,
            device=self.device,
        )
        buffers.load(plan)
        scale = HEAD_DIM**-0.5

        def call(number: int) -> None:
            inputs = KernelInputs(q, self.k, self.v, tables[number], out, scale=scale)
            kernel.run(inputs, buffers)

        return self._timed(call, len(tables))

    def _tables(self, lengths: Int32Array) -> list[torch.Tensor]:
        """As many page tables of the rows as there are pages for; no two share a page."""
        needed = -(-lengths.astype(np.int64) // PAGE)  # pages of each row
        total = int(needed.sum())
        sets = min(len(self.pages) // total, CALLS)
        assert sets >= MIN_SETS, "the measurement needs more pages than the pool has"
        column = np.arange(int(needed.max(initial=1)))
        place = np.minimum((np.cumsum(needed) - needed)[:, None] + column, total - 1)
        at = torch.from_numpy(place).to(self.device)
        return [self.pages[number * total :][at] for number in range(sets)]

    def _timed(self, call: Callable[[int], None], sets: int) -> float:
        """Median time of a call, from replays of a graph of CALLS calls that cycle through sets."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            call(0)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for number in range(CALLS):
                call(number % sets)
            graph.capture_end()
            graph.replay()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in pairwise(events)]
        return statistics.median(times) * 1000 / CALLS
