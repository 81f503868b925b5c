"""CUDA graphs: a step is captured once a bucket and replayed with one call.

The host takes several milliseconds to launch a step of 400 kernels, and a few microseconds to
launch their graph.  All graphs share one memory pool, since only one runs at a time: the largest is
captured first, and the others reuse its memory.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.cuda_graph.step import StepTensors
from runtime.startup.device import free_bytes, is_out_of_memory

# Padding to at most this many times the tokens is better than a step without a graph.
MAX_PADDING = 2
SMALL = 64  # tokens: up to here a step takes about the time of reading the weights
# Under load, a bucket missed MISSES times gets its graph, one every SECONDS_APART: a capture
# delays all requests, by some 90 ms with 36 layers.
MISSES = 16
SECONDS_APART = 3.0
SAMPLED = 4  # graphs besides the largest that are captured to measure the memory of each
# Free memory, besides a graph's own, below which nothing more is captured.  Steps without a graph
# need none of it: startup/memory_profile.py has run the largest, whose memory PyTorch keeps.
RESERVE_BYTES = 64 << 20

log = logging.getLogger("wavefill.graphs")


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    outputs: StepTensors  # aliases: the pool owns the memory, and the next graph overwrites it


class Alias:
    """The memory of a tensor, for another tensor that does not own it."""

    def __init__(self, tensor: Tensor) -> None:
        assert tensor.is_contiguous()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def alias(tensor: Tensor) -> Tensor:
    flat = torch.as_tensor(Alias(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)


class StepFunction(Protocol):
    def __call__(self, bucket: Bucket, *, all_hidden_states: bool = ...) -> StepTensors: ...


class Graphs:
    """Runs steps: from a graph where a fitting bucket has one, else eagerly."""

    def __init__(
        self,
        run: StepFunction,
        dry_run: Callable[[Bucket], None],
        buckets: Buckets,
        device: torch.device,
    ) -> None:
        """run: the step whose block is on the device.

        dry_run: runs a step of padding alone, for all initialization that cannot be captured
        """
        self._run, self._dry_run, self._device = run, dry_run, device
        self.captured: dict[Bucket, CapturedGraph] = {}
        self._buckets = buckets
        self._uncaptured: list[Bucket] = []  # the next one last
        self._fit_cache: dict[Bucket, Bucket] = {}  # results of `fit`; a capture clears it
        self._missed: Counter[Bucket] = Counter()
        self._next_missed = 0.0  # time.monotonic()
        self._bytes_per_graph = 0  # bytes of a graph other than the largest
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()
            # Steps of few tokens come first: without a graph, launches are most of their time.
            self._uncaptured = sorted(
                buckets.graphs(), key=lambda b: (b.decode, -b.tokens, -b.rows)
            )

    def fit(self, tokens: int, rows: int) -> Bucket:
        """The bucket that a step of this many tokens and rows is padded to."""
        best = self._buckets.fit(tokens, rows)
        if best in self.captured or not self.captured:
            return best
        found = self._fit_cache.get(best)
        if found is None:
            found = self._fit_cache[best] = self._next_larger(best)
        # Padding the rows of a mixed step costs too little to be worth another capture.
        if best in self._uncaptured and (found.tokens > best.tokens or found == best):
            self._missed[best] += 1
        return found

    def _next_larger(self, best: Bucket) -> Bucket:
        """The smallest bucket with a graph that holds `best`; `best` itself if there is none."""
        most = max(MAX_PADDING * best.tokens, SMALL)
        fitting = [
            bucket
            for bucket in self.captured
            if best.tokens <= bucket.tokens <= most
            and best.rows <= bucket.rows
            and best.decode == bucket.decode
        ]
        return min(fitting, default=best)

    def run(self, bucket: Bucket, *, all_hidden_states: bool = False) -> StepTensors:
        """all_hidden_states: of all tokens.  Few steps need them, so these run without a graph."""
        captured = self.captured.get(bucket)
        if captured is None or all_hidden_states:
            return self._run(bucket, all_hidden_states=all_hidden_states)
        captured.graph.replay()
        return captured.outputs

    def measure(self) -> int:
        """The bytes of all graphs, extrapolated from a few, which are captured and dropped again.

        0 if none can be captured: steps run without.  Raises only out-of-memory errors.
        """
        try:
            return self._measure()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self._give_up("steps", error)
            self.captured.clear()
            return 0

    def _measure(self) -> int:
        largest, *others = self._buckets.graphs()
        sample = others[:: max(1, len(others) // SAMPLED)]
        free = [free_bytes(self._device)]
        for bucket in (largest, *sample):
            self._capture(bucket)
            self.captured[bucket].graph.replay()  # the first replay allocates, too
            torch.cuda.synchronize(self._device)
            free.append(free_bytes(self._device))
        self.captured.clear()
        self._fit_cache.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._bytes_per_graph = -(-(free[1] - free[-1]) // len(sample)) if sample else 0
        return free[0] - free[1] + self._bytes_per_graph * len(others)

    def capture_startup_set(self) -> None:
        """Capture the graphs that a server has before its first request."""
        startup_set = set(self._buckets.startup_set())
        for bucket in self._buckets.graphs():
            if bucket in startup_set and self._uncaptured:
                self._uncaptured.remove(bucket)
                self._capture_or_give_up(bucket)

    def capture_missed(self) -> None:
        """Called between two steps: capture the bucket that recent steps missed most."""
        if not self._missed or time.monotonic() < self._next_missed:
            return
        [(bucket, count)] = self._missed.most_common(1)
        if count >= MISSES:
            self._missed.clear()
            if bucket in self._uncaptured and self._has_room():
                self._uncaptured.remove(bucket)
                self._capture_or_give_up(bucket)
            self._next_missed = time.monotonic() + SECONDS_APART

    def capture_next(self) -> bool:
        """Capture one more graph, in some 90 ms.  True if there are others after it."""
        if self._uncaptured and self._has_room():
            self._capture_or_give_up(self._uncaptured.pop())
        return bool(self._uncaptured)

    def _has_room(self) -> bool:
        """Whether there is memory for another graph; if not, no further one is captured."""
        if free_bytes(self._device) >= RESERVE_BYTES + 2 * self._bytes_per_graph:
            return True
        log.warning("GPU memory is short: steps of %d sizes have no graph", len(self._uncaptured))
        self._uncaptured = []
        return False

    def _capture_or_give_up(self, bucket: Bucket) -> None:
        """Capture a graph; if that fails, steps of the remaining buckets run without."""
        try:
            self._capture(bucket)
        except RuntimeError as error:  # out of memory, or an operation that cannot be captured
            self._give_up(f"a step of {bucket.tokens} tokens", error)

    def _give_up(self, what: str, error: RuntimeError) -> None:
        log.warning(
            "%s could not be captured, %d sizes run without a graph: %s",
            *(what, len(self._uncaptured), error),
        )
        self._uncaptured = []

    def _capture(self, bucket: Bucket) -> None:
        """Capture a step of padding alone, which changes no state."""
        self._dry_run(bucket)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outputs = self._run(bucket)
            except BaseException:
                with suppress(RuntimeError):  # the graph is incomplete
                    graph.capture_end()
                raise
            graph.capture_end()
        if bucket.tokens <= SMALL:
            graph.replay()  # the first launch takes longer, a large part of a small step
        aliases = StepTensors(alias(outputs.hidden), alias(outputs.logits))
        self._keep(bucket, CapturedGraph(graph, aliases))

    def _keep(self, bucket: Bucket, captured: CapturedGraph) -> None:
        self.captured[bucket] = captured
        self._fit_cache.clear()
