"""Measure the split planners' cost model on a GPU.

    python -m attention.planner.tuning [--file FILE] [--kernel NAME ...]

`wavefill tune` runs this in a process of its own.  It times synthetic plans with each decode kernel
that the GPU can run (timing.py), fits the cost model, and writes it for costs.py.  Then it compares
predicted with measured times of real plans.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from attention.backend import UnsupportedAttention
from attention.dispatch import Machine
from attention.planned_kernel import PlannedKernel, decode_kernel
from attention.planner.costs import (
    SHIPPED,
    STANDARD,
    DeviceCosts,
    shipped_costs,
    tuned_file,
    write_tuned,
)
from attention.planner.queued_plans import plan_fa3, plan_greedy, plan_of_counts
from attention.planner.simulation import combine_time, makespan
from attention.planner.split_plan import HostSplitPlan, Int32Array, SplitPlanSpec, planned_rows
from attention.planner.stream_k import plan_stream_k
from attention.planner.timing import (
    DTYPE,
    GROUP,
    HEAD_DIM,
    SHAPE,
    KernelTimer,
    follows,
    kernels_of,
)

# (work tiles of each program, blocks of a work tile)
FIT_SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (1, 16), (1, 32), (2, 1), (2, 4), (2, 16))
FIT_SHAPES += ((4, 2), (4, 8))
BATCHES = ((1, 4096), (1, 16384), (6, 4096), (17, 8192), (32, 4096), (48, 4096), (67, 4096))
BATCHES += ((140, 4096), (48, 16384))
# (cu_seqlens_q, cache_seqlens, spec) -> plan
HostPlanner = Callable[[Int32Array, Int32Array, SplitPlanSpec], HostSplitPlan]
PLANNERS: dict[str, HostPlanner] = {
    "stream-k": plan_stream_k,
    "greedy": plan_greedy,
    "fa3": plan_fa3,
}
# Microseconds of a call with a plan.
TimeFunction = Callable[[HostSplitPlan, SplitPlanSpec, Int32Array], float]


def equal_work_tiles(
    spec: SplitPlanSpec, work_tiles: int, blocks: int, *, cut: int = 0, active: int | None = None
) -> tuple[HostSplitPlan, SplitPlanSpec, Int32Array]:
    """-> (plan, spec, row lengths): each active program gets equal work tiles of `blocks` blocks.

    active: number of programs with work; None: all.  The first `cut` work tiles, an even number,
    are halves of rows, whose partial results are combined.
    """
    active = spec.programs if active is None else active
    whole = active * work_tiles - cut
    counts = np.array([2] * (cut // 2) + [1] * whole, dtype=np.int32)
    lengths = counts * np.int32(blocks * spec.block)
    rows = planned_rows(np.arange(len(counts) + 1, dtype=np.int32), lengths, spec)
    plan = plan_of_counts(rows, counts, spec)
    starts = np.minimum(np.arange(spec.programs + 1, dtype=np.int32), active) * np.int32(work_tiles)
    return HostSplitPlan(plan.work, starts, plan.merges, queued=False), spec, lengths


def spec_of(costs: DeviceCosts, kernel: PlannedKernel, sms: int) -> SplitPlanSpec:
    return costs.spec(
        kv_heads=1,
        programs=sms * kernel.ctas_per_sm,
        group=GROUP,
        head_dim=HEAD_DIM,
        item_bytes=DTYPE.itemsize,
        block=kernel.block_n,
    )


@dataclass(frozen=True, slots=True)
class Fit:
    launch_us: float
    work_tile_us: float
    block_us: float


def fit_work_tiles(timer: TimeFunction, spec: SplitPlanSpec) -> Fit:
    """Fit launch + p * work_tile + p * k * block, with p work tiles of k blocks per program."""
    measured = [timer(*equal_work_tiles(spec, *shape)) for shape in FIT_SHAPES]
    print("p work tiles of k blocks per program, us (measured, fitted)")
    matrix = np.array(
        [[1, work_tiles, work_tiles * blocks] for work_tiles, blocks in FIT_SHAPES], dtype=float
    )
    weight = 1 / np.array(measured)  # least squares of relative errors
    found = np.linalg.lstsq(matrix * weight[:, None], np.ones(len(measured)), rcond=None)[0]
    for (work_tiles, blocks), us, fitted in zip(FIT_SHAPES, measured, matrix @ found, strict=True):
        print(f"  p {work_tiles} k {blocks:>2}  {us:8.2f} {fitted:8.2f}")
    launch, work_tile, block = (max(float(value), 0.01) for value in found)
    return Fit(launch, work_tile, block)


def fit_merges(timer: TimeFunction, spec: SplitPlanSpec) -> tuple[float, float]:
    """-> (fixed us of a combine, us of one partial result per program)."""
    programs = spec.programs - spec.programs % 2
    cuts = (0, 2, programs // 4 * 2, programs, 2 * programs)
    times = [timer(*equal_work_tiles(spec, 2, 4, cut=cut)) for cut in cuts]
    print("2 work tiles of 4 blocks per program: partial results, us")
    for cut, us in zip(cuts, times, strict=True):
        print(f"  {cut:>5} {us:8.2f}")
    shares = np.array(cuts[1:]) / spec.programs
    slope, base = np.polyfit(shares, np.array(times[1:]) - times[0], 1)
    return max(float(base), 0.01), max(float(slope), 0.01)


def fit_rho(timer: TimeFunction, spec: SplitPlanSpec) -> float:
    """A program's speedup when few programs read, from work tiles of 16 and of 48 blocks."""
    print("active programs, their read bandwidth in TB/s")
    speeds: dict[int, float] = {}
    for share in (16, 8, 4, 2, 1):
        active = spec.programs // share
        few, many = (
            timer(*equal_work_tiles(spec, 1, blocks, active=active)) for blocks in (16, 48)
        )
        block_us = max(many - few, 0.01) / 32
        speeds[active] = 1 / block_us
        read_bytes = 2 * spec.block * HEAD_DIM * DTYPE.itemsize * active
        print(f"  {active:>5} {read_bytes / block_us / 1e6:8.2f}")
    return max(speeds.values()) / speeds[spec.programs]


def measure(timer: TimeFunction, spec: SplitPlanSpec) -> DeviceCosts:
    """Measure the costs of the timer's kernel on a grid of spec.programs."""
    fit = fit_work_tiles(timer, spec)
    merge_us, partial_us = fit_merges(timer, spec)
    block_bytes = 2 * spec.block * HEAD_DIM * DTYPE.itemsize * spec.programs
    partial_bytes = GROUP * HEAD_DIM * 8 * spec.programs
    return DeviceCosts(
        read_tbs=round(block_bytes / fit.block_us / 1e6, 3),
        launch_us=round(fit.launch_us, 2),
        piece_us=round(fit.work_tile_us, 2),
        merge_us=round(merge_us, 2),
        merge_tbs=round(partial_bytes / partial_us / 1e6, 3),
        rho=round(max(fit_rho(timer, spec), 1.0), 2),
    )


def compare(timer: TimeFunction, kernel: PlannedKernel, costs: DeviceCosts, sms: int) -> None:
    """Print predicted and measured times of real plans."""
    spec = spec_of(costs, kernel, sms)
    block_us = costs.block_us(
        block=spec.block, head_dim=HEAD_DIM, item_bytes=DTYPE.itemsize, programs=spec.programs
    )
    planners = {n: planner for n, planner in PLANNERS.items() if follows(kernel.name, n)}
    print("plans, us: predicted and measured")
    print(" " * 12 + "".join(f"{name:>18}" for name in planners))
    pairs: list[tuple[float, float]] = []
    for rows, length in BATCHES:
        line = f"{rows:>4} x {length:<5}"
        cu_seqlens_q = np.arange(rows + 1, dtype=np.int32)
        lengths = np.full(rows, length, dtype=np.int32)
        for planner in planners.values():
            plan = planner(cu_seqlens_q, lengths, spec)
            blocks = makespan(plan, spec, costs.rho) + combine_time(plan, spec)
            predicted = costs.launch_us + block_us * blocks
            measured = timer(plan, spec, lengths)
            pairs.append((predicted, measured))
            line += f"{predicted:>9.1f}{measured:>9.1f}"
        print(line)
    logs = np.log(np.array(pairs))
    errors = np.abs(logs[:, 0] - logs[:, 1])
    correlation = np.corrcoef(logs[:, 0], logs[:, 1])[0, 1]
    print(f"correlation of the logarithms {correlation:.4f}, median error {np.median(errors):.1%}")


def calibrate(device: KernelTimer, kernel: PlannedKernel) -> DeviceCosts:
    def timer(plan: HostSplitPlan, spec: SplitPlanSpec, lengths: Int32Array) -> float:
        return device.microseconds(kernel, plan, spec, lengths)

    print(f"\n{kernel.name}, {kernel.ctas_per_sm} CTAs per SM, blocks of {kernel.block_n}")
    costs = measure(timer, spec_of(shipped_costs(device.name, kernel.name), kernel, device.sms))
    compare(timer, kernel, costs, device.sms)
    print(costs)
    return costs


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--file", type=Path, default=tuned_file(), help="output file; %(default)s")
    parser.add_argument(
        "--kernel", nargs="+", choices=list(SHIPPED[STANDARD]), help="default: all of this GPU"
    )
    args = parser.parse_args(argv)
    try:
        names = args.kernel or kernels_here()
    except UnsupportedAttention as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    device = KernelTimer()
    print(f"{device.name}, {device.sms} SMs")
    costs = {name: calibrate(device, decode_kernel(name, SHAPE, 1)) for name in names}
    write_tuned(args.file, device.name, costs)
    print(f"\nwrote {args.file}: a server that is started now uses it")
    return 0


def kernels_here() -> list[str]:
    """The decode kernels of this machine; raises UnsupportedAttention, naming the remedy."""
    if not torch.cuda.is_available():
        raise UnsupportedAttention(
            "tune measures a CUDA device, and PyTorch finds none: run it on the serving machine; "
            "GPUs that are not measured use the built-in costs"
        )
    machine = Machine.of(torch.device("cuda", torch.cuda.current_device()))
    if machine.interpreted:
        raise UnsupportedAttention("TRITON_INTERPRET=1 keeps the kernels off the GPU: unset it")
    return kernels_of(machine)


if __name__ == "__main__":
    raise SystemExit(main())
