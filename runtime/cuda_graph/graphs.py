"""CUDA graphs: a step is captured once a bucket and replayed with one call.

The host takes several milliseconds to launch a step of 400 kernels, and a few microseconds to
launch their graph.  All graphs share one memory pool (pool.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from model_zoo.layers.gemm.timing import replayed_us
from runtime.cuda_graph.buckets import Bucket
from runtime.cuda_graph.pool import GraphPool, alias
from runtime.cuda_graph.step import StepTensors
from runtime.startup.device import free_bytes

SMALL = 64  # tokens: up to here the first launch of a graph takes a large part of a step's time
TIMED = 7  # replays of each graph, of which the median counts
SAMPLED = 4  # graphs besides the largest that are captured to measure the memory of each

log = logging.getLogger("wavefill.graphs")


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    graph: torch.cuda.CUDAGraph
    outputs: StepTensors  # aliases: the pool owns the memory, and the next graph overwrites it


class Graphs:
    """The graphs of buckets."""

    def __init__(
        self,
        run: Callable[[Bucket], StepTensors],
        dry_run: Callable[[Bucket], None],
        device: torch.device,
    ) -> None:
        """run: the step whose block is on the device.

        dry_run: runs a step of padding alone, for all initialization that cannot be captured
        """
        self._run, self._dry_run, self._device = run, dry_run, device
        self.captured: dict[Bucket, CapturedGraph] = {}
        self.pool = GraphPool(device)
        # Tokens of a step that the device computes for as long as the host takes to launch its
        # kernels, if its time is proportional to them, which is nearly so for many.
        self.launch_bound_tokens = 0
        self._launch_seconds = 0.0  # of the last step that was captured: what the host took

    def measure(self, buckets: Sequence[Bucket]) -> tuple[int, int]:
        """The bytes of the graphs of all buckets, the largest first, and of one that is not the
        largest: extrapolated from a few, which are captured and dropped again.  Measures
        launch_bound_tokens, too.

        A step with images needs a little more memory than the largest without: so the largest of
        these is captured, too, and its part of the pool counted once.
        """
        largest = [
            *[bucket for bucket in buckets if not bucket.images][:1],
            *[bucket for bucket in buckets if bucket.images][:1],
        ]
        others = [bucket for bucket in buckets if bucket not in largest]
        sample = others[:: max(1, len(others) // SAMPLED)]
        free = [free_bytes(self._device)]
        try:
            for bucket in (*largest, *sample):
                self.capture(bucket)
                if bucket == largest[0]:
                    self.launch_bound_tokens = self._launch_bound_tokens(bucket)
                else:
                    self._replay(bucket)  # the first replay allocates, too
                free.append(free_bytes(self._device))
        finally:
            self.captured.clear()
        self.pool.renew()
        beside = free[len(largest)]  # them
        each = -(-(beside - free[-1]) // len(sample)) if sample else 0
        return free[0] - beside + each * len(others), each

    def step_times(
        self, bucket: Bucket, choices: Sequence[Callable[[], None]], queue: Callable[[], None]
    ) -> list[float]:
        """Median microseconds of a bucket's step after each of `choices` has been called: infinite
        where it cannot be captured, and none if it cannot after the first one.

        queue: queues a step of the bucket, whose block the graphs then find on the device.
        """
        assert not self.captured
        recorded: dict[int, torch.cuda.CUDAGraph] = {}
        try:
            for place, choose in enumerate(choices):
                choose()
                graph = self._recorded(bucket)
                if graph is not None:
                    recorded[place] = graph
                elif place == 0:
                    return []
            choices[0]()
            queue()
            took = replayed_us([*recorded.values()], 1, TIMED)
        finally:
            places = list(recorded)
            recorded.clear()
            self.pool.renew()
        found = dict(zip(places, took, strict=True))
        return [found.get(place, math.inf) for place in range(len(choices))]

    def _recorded(self, bucket: Bucket) -> torch.cuda.CUDAGraph | None:
        """The graph of a bucket's step; None if it cannot be captured."""
        try:
            self._dry_run(bucket)
            return self.pool.record(lambda: self._run(bucket))[0]
        except (RuntimeError, OutOfResources) as error:
            log.debug("a step of %d rows is not timed: %s", bucket.rows, error)
            return None

    def _launch_bound_tokens(self, bucket: Bucket) -> int:
        """From a bucket that has just been captured.  Replays as often whatever it measures, since
        all ranks of a divided model have to replay together."""
        self._replay(bucket)  # the first replay uploads the graph
        launched, computed = self._launch_seconds, self._replay(bucket)
        log.debug(
            "the host launches a step in %.1f ms, the device computes %d tokens in %.1f ms",
            *(1e3 * launched, bucket.tokens, 1e3 * computed),
        )
        return int(bucket.tokens * launched / computed)

    def _replay(self, bucket: Bucket) -> float:
        """Seconds of a replay."""
        torch.cuda.synchronize(self._device)
        began = time.perf_counter()
        self.captured[bucket].graph.replay()
        torch.cuda.synchronize(self._device)
        return time.perf_counter() - began

    def _timed_run(self, bucket: Bucket) -> StepTensors:
        began = time.perf_counter()
        outputs = self._run(bucket)
        self._launch_seconds = time.perf_counter() - began
        return outputs

    def capture(self, bucket: Bucket) -> None:
        """Capture a step of padding alone, which changes no state.

        Raises RuntimeError if memory runs out or an operation cannot be captured.
        """
        self._dry_run(bucket)
        graph, outputs = self.pool.record(lambda: self._timed_run(bucket))
        if bucket.tokens <= SMALL:
            graph.replay()
        aliases = StepTensors(alias(outputs.hidden), alias(outputs.logits))
        self.captured[bucket] = CapturedGraph(graph, aliases)
