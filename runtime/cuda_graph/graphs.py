"""Graphs: steps captured once a bucket and replayed with one call.

A step of 400 kernels takes the host several milliseconds to queue and a graph of them a few
microseconds.  All graphs share one pool of memory, since only one runs at a time: the largest is
captured first, and the others find room where it left off.
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

# A graph of at most so many times the tokens is better than no graph.
MAX_PADDING = 2
SMALL = 64  # tokens: up to here a step takes about the time of reading the weights
# Under load, a size that was missed so often gets its graph, one every few seconds: capturing it
# holds all answers up, for some 90 ms with 36 layers.
MISSES = 16
SECONDS_APART = 3.0
SAMPLED = 4  # graphs beside the largest, to know what another one takes
# Free memory below which nothing more is captured, besides what a graph takes.  Steps without a
# graph need none of it: the largest have been run (trial.py), and PyTorch keeps what they took.
RESERVE_BYTES = 64 << 20

log = logging.getLogger("wavefill.graphs")


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    outcome: StepTensors  # seen through aliases: the memory is the pool's, and the next graph's


class Alias:
    """Memory at an address, as a tensor that does not own it."""

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
    """Runs steps: from a graph where there is one of a fitting size, else as they are called."""

    def __init__(
        self,
        run: StepFunction,
        dry_run: Callable[[Bucket], None],
        buckets: Buckets,
        device: torch.device,
    ) -> None:
        """run: the step whose block is on the device.

        rehearse: makes that one without rows, and does once what cannot be done in a graph
        """
        self._run, self._dry_run, self._device = run, dry_run, device
        self.captured: dict[Bucket, CapturedGraph] = {}
        self._buckets = buckets
        self._waiting: list[Bucket] = []  # the next one last
        self._fitting: dict[Bucket, Bucket] = {}  # as `fit` has found; a capture may change it
        self._missed: Counter[Bucket] = Counter()
        self._next_missed = 0.0  # time.monotonic()
        self._each = 0  # bytes that a graph beside the largest takes
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()
            # Steps of few tokens come first: what they lose without a graph is most of their time.
            self._waiting = sorted(buckets.graphs(), key=lambda b: (b.decode, -b.tokens, -b.rows))

    def fit(self, tokens: int, rows: int) -> Bucket:
        """The bucket that a step of so many tokens and rows is to be padded to."""
        best = self._buckets.fit(tokens, rows)
        if best in self.captured or not self.captured:
            return best
        found = self._fitting.get(best)
        if found is None:
            found = self._fitting[best] = self._next_larger(best)
        # More rows cost a mixed step little, too little for the time that another graph takes.
        if best in self._waiting and (found.tokens > best.tokens or found == best):
            self._missed[best] += 1
        return found

    def _next_larger(self, best: Bucket) -> Bucket:
        """The smallest one with a graph that holds `best`; itself if there is none."""
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
        """all_hidden_states: of all tokens.  Few steps are asked for them, so no graph has them."""
        captured = self.captured.get(bucket)
        if captured is None or all_hidden_states:
            return self._run(bucket, all_hidden_states=all_hidden_states)
        captured.graph.replay()
        return captured.outcome

    def measure(self) -> int:
        """Bytes that all graphs will take.  The few that are captured for it are dropped again.

        0 if none can be captured: steps go without.  Raises what says that memory is out.
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
            self.captured[bucket].graph.replay()  # some memory is taken by the first one
            torch.cuda.synchronize(self._device)
            free.append(free_bytes(self._device))
        self.captured.clear()
        self._fitting.clear()
        self._pool = torch.cuda.graph_pool_handle()
        self._each = -(-(free[1] - free[-1]) // len(sample)) if sample else 0
        return free[0] - free[1] + self._each * len(others)

    def capture_startup_set(self) -> None:
        """What a server needs before its first request."""
        startup_set = set(self._buckets.startup_set())
        for bucket in self._buckets.graphs():
            if bucket in startup_set and self._waiting:
                self._waiting.remove(bucket)
                self._try(bucket)

    def capture_missed(self) -> None:
        """Between two steps: what the last ones would have needed."""
        if not self._missed or time.monotonic() < self._next_missed:
            return
        [(bucket, count)] = self._missed.most_common(1)
        if count >= MISSES:
            self._missed.clear()
            if bucket in self._waiting and self._has_room():
                self._waiting.remove(bucket)
                self._try(bucket)
            self._next_missed = time.monotonic() + SECONDS_APART

    def capture_next(self) -> bool:
        """Capture one more, which takes some 90 ms.  True if there are others after it."""
        if self._waiting and self._has_room():
            self._try(self._waiting.pop())
        return bool(self._waiting)

    def _has_room(self) -> bool:
        """Whether there is memory for another graph; else none is waited for any more."""
        if free_bytes(self._device) >= RESERVE_BYTES + 2 * self._each:
            return True
        log.warning("GPU memory is short: steps of %d sizes have no graph", len(self._waiting))
        self._waiting = []
        return False

    def _try(self, bucket: Bucket) -> None:
        """Capture, if that works: without a graph a step is slower, and nothing worse."""
        try:
            self._capture(bucket)
        except RuntimeError as error:  # out of memory; what CUDA or a library cannot capture
            self._give_up(f"a step of {bucket.tokens} tokens", error)

    def _give_up(self, what: str, error: RuntimeError) -> None:
        log.warning(
            "%s could not be captured, %d sizes run without a graph: %s",
            *(what, len(self._waiting), error),
        )
        self._waiting = []

    def _capture(self, bucket: Bucket) -> None:
        """On a step without rows, which changes nothing."""
        self._dry_run(bucket)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                outcome = self._run(bucket)
            except BaseException:
                with suppress(RuntimeError):  # what is wrong with a graph that ends early is known
                    graph.capture_end()
                raise
            graph.capture_end()
        if bucket.tokens <= SMALL:
            graph.replay()  # the first launch takes longer, which a small step would feel
        aliases = StepTensors(alias(outcome.hidden), alias(outcome.logits))
        self._keep(bucket, CapturedGraph(graph, aliases))

    def _keep(self, bucket: Bucket, captured: CapturedGraph) -> None:
        self.captured[bucket] = captured
        self._fitting.clear()
