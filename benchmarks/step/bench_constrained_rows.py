"""Microseconds that constrained rows add to the sampling of a step, on a GPU.

    python -m benchmarks.step.bench_constrained_rows [--rows 8 64 256] [--constrained 0 1 16]

All rows are sampled with top-p 0.95; some have a grammar, a logit bias or log-probabilities.  A
step samples the others in a CUDA graph, and runtime/sampling/constrained_rows.py these after it.
GPU times are between events while the host is far ahead, host times are those of the calls; both
include the download of the tokens; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention.timing import elapsed_us
from benchmarks.step.bench_sampler import make_logits, params
from runtime.executor.transfers import Download
from runtime.messages import SamplingParams
from runtime.sampling.constrained_rows import ConstrainedRows, DeferredRows
from runtime.sampling.kernels.sample import sample
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.sampling.state import ROW_WORDS, SamplerState, is_constrained
from runtime.scheduler.batch import NewRow

SLEEP_CYCLES = 20_000_000  # cycles that the GPU sleeps while the host queues: some 11 ms
PLAIN = params(temperature=0.7, top_p=0.95)
KINDS: dict[str, SamplingParams] = {
    "grammar": params(temperature=0.7, top_p=0.95, grammar="any"),
    "5 logprobs": params(temperature=0.7, top_p=0.95, logprobs=5),
    "bias": params(temperature=0.7, top_p=0.95, logit_bias={9 * id: 0.5 for id in range(20)}),
}


class ConstrainedCase:
    """A batch and the state of its rows."""

    def __init__(self, kind: str, logits: Tensor, constrained: int) -> None:
        rows, self.vocab = logits.shape
        self.device = logits.device
        self.logits = logits
        chosen = set(np.linspace(0, rows - 1, constrained).astype(int).tolist())
        kinds = [KINDS[kind] if row in chosen else PLAIN for row in range(rows)]
        self.new_rows = [
            NewRow(row, constraints, row, 400, []) for row, constraints in enumerate(kinds)
        ]
        self.rows = np.array(sorted(chosen), dtype=np.int64)
        masked = np.array([row for row in self.rows if kinds[row].grammar], dtype=np.int64)
        chance = np.random.default_rng(rows)
        shape = len(masked), -(-self.vocab // 8)
        bits = chance.integers(0, 256, shape, dtype=np.uint8)
        self.behind = AllowedMasks(np.arange(len(masked)), bits)
        apart = is_constrained(KINDS[kind])
        none = np.zeros(0, dtype=np.int64)
        self.deferred = DeferredRows(self.rows, none) if apart else DeferredRows(none, self.rows)
        self.last_token = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.read: list[object] = []  # by a graph, which does not keep it

    def sample(self) -> Callable[[], object]:
        state = SamplerState(len(self.new_rows), self.vocab, self.device)
        constrained_rows = ConstrainedRows(state, self.last_token)
        for row in self.new_rows:
            constrained_rows.reset(row)
        step = self.step(state, self.deferred.constrained)
        slots, ends = np.arange(len(self.new_rows)), np.full(len(self.new_rows), 500)

        def call() -> object:
            step()
            if not self.deferred:
                return None
            return fetch(
                constrained_rows.sample(self.logits, slots, ends, self.deferred, self.behind)
            )

        return call

    def step(self, state: SamplerState, apart: np.ndarray) -> Callable[[], object]:
        """A graph of the sampling within the step."""
        block = np.zeros((len(self.new_rows), ROW_WORDS), dtype=np.int32)
        state.pack(self.new_rows, block)
        state.apply(torch.from_numpy(block).to(self.device))
        where = np.arange(len(self.new_rows), dtype=np.int32)
        where[apart] = -1
        slots = torch.from_numpy(where).to(self.device)
        tokens, ends = torch.zeros_like(slots), torch.full_like(slots, 500)
        call = (self.logits, slots, ends, state, self.last_token, tokens, tokens)
        self.read.append(call)
        sample(*call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sample(*call)
        return graph.replay


def fetch(sampler_output: SamplerOutput) -> Download:
    return Download(sampler_output.tensors(), sampler_output.tokens.device)


def timed(call: Callable[[], object], calls: int) -> tuple[float, float]:
    """(us of the GPU, us of the host)"""
    call()
    call()
    gpu: list[float] = []
    host: list[float] = []

    def host_timed() -> None:
        began = time.perf_counter()
        call()
        host.append((time.perf_counter() - began) * 1e6)

    for _ in range(calls):
        torch.cuda.synchronize()
        torch.cuda._sleep(SLEEP_CYCLES)
        gpu.append(elapsed_us(host_timed))
    return statistics.median(gpu), statistics.median(host)


def main() -> None:
    parser = argparse.ArgumentParser(description="Microseconds that constrained rows add.")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--constrained", type=int, nargs="+", default=[0, 1, 16])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--calls", type=int, default=15)
    args = parser.parse_args()
    print(f"GPU us (host us), {args.vocab} bfloat16 logits")
    print("| rows | constrained | kind | us |")
    print("|---|---|---|---|")
    with torch.inference_mode():
        for rows in args.rows:
            logits = make_logits(rows, args.vocab, torch.bfloat16, flat=False)[0]
            for constrained in sorted({min(some, rows) for some in args.constrained}):
                for kind in KINDS if constrained else list(KINDS)[:1]:
                    case = ConstrainedCase(kind, logits, constrained)
                    gpu, host = timed(case.sample(), args.calls)
                    print(
                        f"| {rows} | {constrained} | {kind} | {gpu:.0f} ({host:.0f}) |", flush=True
                    )


if __name__ == "__main__":
    main()
