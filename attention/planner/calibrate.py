"""Measure on a GPU what the planners charge.

    python -m attention.planner.calibrate [--file FILE]

What `wavefill tune` runs, in a process of its own.  It times the real decode kernel with plans made
for the purpose, in CUDA graphs and over keys and values far larger than the cache, fits the times,
and writes them for costs.py.  At the end it compares what the fit predicts with what plans take.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from attention.kernels.decode import DecodeConfig, decode, decode_config
from attention.planner.costs import DeviceCosts, shipped_costs, tuned_file, write_tuned
from attention.planner.counts import plan_of_counts
from attention.planner.fa3 import plan_fa3
from attention.planner.greedy import plan_greedy
from attention.planner.plan import HostPlan, Ints, PlanSpec, SplitPlan, planned_rows
from attention.planner.simulate import combine_time, makespan
from attention.planner.uneven import plan_uneven

GROUP, HEAD_DIM, PAGE = 8, 128, 16
DTYPE = torch.bfloat16
KV_BYTES = 2 << 30  # of keys and as many of values: no plan finds its own in the cache
MIN_SETS, CALLS, REPLAYS = 2, 24, 9
WHOLE = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 1), (2, 4), (2, 16), (4, 2), (4, 8))
BATCHES = ((1, 16384), (6, 4096), (17, 8192), (32, 4096), (48, 4096), (67, 4096), (140, 4096))


class Device:
    """Keys and values of one KV head in shuffled pages, and the timing of plans over them."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        properties = torch.cuda.get_device_properties(self.device)
        self.name, self.sms = properties.name, properties.multi_processor_count
        page_bytes = PAGE * HEAD_DIM * DTYPE.itemsize
        num_pages = min(KV_BYTES, properties.total_memory // 8) // page_bytes
        shape = (num_pages, 1, PAGE, HEAD_DIM)
        self.k = torch.randn(shape, device=self.device, dtype=DTYPE)
        self.v = torch.randn(shape, device=self.device, dtype=DTYPE)
        self.pages = torch.randperm(num_pages, device=self.device, dtype=torch.int32)
        self.stream = torch.cuda.Stream()

    def microseconds(self, plan: HostPlan, spec: PlanSpec, lengths: Ints) -> float:
        """Median of a call with this plan of rows of these lengths, each call over other pages."""
        config = _config()
        rows = len(lengths)
        needed = -(-lengths.astype(np.int64) // PAGE)  # pages of each row
        total = int(needed.sum())
        sets = min(len(self.pages) // total, CALLS)
        assert sets >= MIN_SETS, "the measurement is larger than the memory it may use"
        column = np.arange(int(needed.max(initial=1)))
        place = np.minimum((np.cumsum(needed) - needed)[:, None] + column, total - 1)
        at = torch.from_numpy(place).to(self.device)
        tables = [self.pages[number * total :][at] for number in range(sets)]
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
            table = tables[number % sets]
            decode(q, self.k, self.v, table, buffers, out, scale=scale, config=config)

        return self._timed(call)

    def _timed(self, call: Callable[[int], None]) -> float:
        """Replays of a graph of CALLS calls."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            call(0)
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin()
            for number in range(CALLS):
                call(number)
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


def _config() -> DecodeConfig:
    return decode_config(HEAD_DIM, DTYPE, GROUP)


def equal_pieces(
    spec: PlanSpec, pieces: int, blocks: int, *, cut: int = 0, active: int | None = None
) -> tuple[HostPlan, Ints]:
    """-> a plan that gives each of `active` programs (all) so many pieces of so many blocks, and
    the lengths of its rows.

    The first `cut` pieces, an even number, are halves of rows: partial results to be combined.
    """
    active = spec.programs if active is None else active
    whole = active * pieces - cut
    counts = np.array([2] * (cut // 2) + [1] * whole, dtype=np.int32)
    lengths = counts * np.int32(blocks * spec.block)
    rows = planned_rows(np.arange(len(counts) + 1, dtype=np.int32), lengths, spec)
    plan = plan_of_counts(rows, counts, spec)
    starts = np.minimum(np.arange(spec.programs + 1, dtype=np.int32), active) * np.int32(pieces)
    return HostPlan(plan.work, starts, plan.merges, queued=False), lengths


def batch(rows: int, length: int) -> tuple[Ints, Ints]:
    return np.arange(rows + 1, dtype=np.int32), np.full(rows, length, dtype=np.int32)


def best_programs_per_sm(device: Device, guess: DeviceCosts) -> int:
    """The number with the least geometric mean of times, evenly cut batches."""
    scores: dict[int, float] = {}
    print("programs an SM, us evenly cut: " + "  ".join(f"{b} x {n}" for b, n in BATCHES))
    for number in (1, 2, 3, 4):
        times: list[float] = []
        for rows, length in BATCHES:
            spec = _spec(replace(guess, programs_per_sm=number), device.sms)
            cu_seqlens_q, lengths = batch(rows, length)
            plan = plan_uneven(cu_seqlens_q, lengths, spec)
            times.append(device.microseconds(plan, spec, lengths))
        scores[number] = statistics.geometric_mean(times)
        print(f"{number:>14}  " + "  ".join(f"{us:7.1f}" for us in times))
    return min(scores, key=lambda number: scores[number])


def _spec(costs: DeviceCosts, sms: int) -> PlanSpec:
    return costs.spec(
        kv_heads=1,
        programs=sms * costs.programs_per_sm,
        group=GROUP,
        head_dim=HEAD_DIM,
        item_bytes=DTYPE.itemsize,
        block=_config().block_n,
    )


@dataclass(frozen=True, slots=True)
class Fit:
    launch_us: float
    piece_us: float
    block_us: float


def fit_pieces(device: Device, spec: PlanSpec) -> Fit:
    """Every program serves p pieces of k blocks: launch + p * piece + p * k * block."""
    measured = [
        device.microseconds(*_with_spec(spec, equal_pieces(spec, pieces, blocks)))
        for pieces, blocks in WHOLE
    ]
    print("every program p pieces of k blocks, us (measured, fitted)")
    matrix = np.array([[1, pieces, pieces * blocks] for pieces, blocks in WHOLE], dtype=float)
    weight = 1 / np.array(measured)  # errors count by their share
    found = np.linalg.lstsq(matrix * weight[:, None], np.ones(len(measured)), rcond=None)[0]
    for (pieces, blocks), us, fitted in zip(WHOLE, measured, matrix @ found, strict=True):
        print(f"  p {pieces} k {blocks:>2}  {us:8.2f} {fitted:8.2f}")
    launch, piece, block = (max(float(value), 0.01) for value in found)
    return Fit(launch, piece, block)


def _with_spec(spec: PlanSpec, made: tuple[HostPlan, Ints]) -> tuple[HostPlan, PlanSpec, Ints]:
    plan, lengths = made
    return plan, spec, lengths


def fit_merges(device: Device, spec: PlanSpec) -> tuple[float, float]:
    """-> (us of a call that merges anything, us of a partial result for each program)."""
    programs = spec.programs - spec.programs % 2
    cuts = (0, 2, programs // 4 * 2, programs, 2 * programs)
    times = [
        device.microseconds(*_with_spec(spec, equal_pieces(spec, 2, 4, cut=cut))) for cut in cuts
    ]
    print("2 pieces of 4 blocks, so many partial results, us")
    for cut, us in zip(cuts, times, strict=True):
        print(f"  {cut:>5} {us:8.2f}")
    shares = np.array(cuts[1:]) / spec.programs
    slope, base = np.polyfit(shares, np.array(times[1:]) - times[0], 1)
    return max(float(base), 0.01), max(float(slope), 0.01)


def fit_rho(device: Device, spec: PlanSpec) -> float:
    """How much faster a program reads if only a few do; 32 blocks each, their fill taken off."""
    print("active programs, TB/s of their reading")
    speeds: dict[int, float] = {}
    for share in (16, 8, 4, 2, 1):
        active = spec.programs // share
        few, many = (
            device.microseconds(*_with_spec(spec, equal_pieces(spec, 1, blocks, active=active)))
            for blocks in (16, 48)
        )
        block_us = max(many - few, 0.01) / 32
        speeds[active] = 1 / block_us
        read_bytes = 2 * spec.block * HEAD_DIM * DTYPE.itemsize * active
        print(f"  {active:>5} {read_bytes / block_us / 1e6:8.2f}")
    return max(speeds.values()) / speeds[spec.programs]


def measure(device: Device) -> DeviceCosts:
    guess = shipped_costs(device.name)
    best = best_programs_per_sm(device, guess)
    spec = _spec(replace(guess, programs_per_sm=best), device.sms)
    fit = fit_pieces(device, spec)
    merge_us, partial_us = fit_merges(device, spec)
    block_bytes = 2 * spec.block * HEAD_DIM * DTYPE.itemsize * spec.programs
    partial_bytes = GROUP * HEAD_DIM * 8 * spec.programs
    return DeviceCosts(
        programs_per_sm=best,
        read_tbs=round(block_bytes / fit.block_us / 1e6, 3),
        launch_us=round(fit.launch_us, 2),
        piece_us=round(fit.piece_us, 2),
        merge_us=round(merge_us, 2),
        merge_tbs=round(partial_bytes / partial_us / 1e6, 3),
        rho=round(max(fit_rho(device, spec), 1.0), 2),
    )


def compare(device: Device, costs: DeviceCosts) -> None:
    """Predicted and measured time of whole plans."""
    spec = _spec(costs, device.sms)
    block_us = costs.block_us(
        block=spec.block, head_dim=HEAD_DIM, item_bytes=DTYPE.itemsize, programs=spec.programs
    )
    planners = (("fa3", plan_fa3), ("greedy", plan_greedy), ("uneven", plan_uneven))
    print("plans, us: predicted and measured")
    print(" " * 12 + "".join(f"{name:>18}" for name, _ in planners))
    pairs: list[tuple[float, float]] = []
    for rows, length in BATCHES:
        line = f"{rows:>4} x {length:<5}"
        for _, planner in planners:
            cu_seqlens_q, lengths = batch(rows, length)
            plan = planner(cu_seqlens_q, lengths, spec)
            blocks = makespan(plan, spec, costs.rho) + combine_time(plan, spec)
            predicted = costs.launch_us + block_us * blocks
            measured = device.microseconds(plan, spec, lengths)
            pairs.append((predicted, measured))
            line += f"{predicted:>9.1f}{measured:>9.1f}"
        print(line)
    logs = np.log(np.array(pairs))
    errors = np.abs(logs[:, 0] - logs[:, 1])
    correlation = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    print(f"correlation of the logarithms {correlation:.4f}, median error {np.median(errors):.1%}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--file", type=Path, default=tuned_file(), help="written; %(default)s")
    args = parser.parse_args(words)
    if not torch.cuda.is_available():
        print(
            "error: tune measures a CUDA device and there is none: run it on the machine that is "
            "to serve; without it the shipped values are used",
            file=sys.stderr,
        )
        return 1
    device = Device()
    print(f"{device.name}, {device.sms} SMs")
    costs = measure(device)
    compare(device, costs)
    write_tuned(args.file, device.name, costs)
    print(f"{costs}\nwrote {args.file}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
