"""Simulated makespan of the split planners' plans, relative to its lower bound.

    python -m benchmarks.attention.bench_planner                 tables, ten seconds
    python -m benchmarks.attention.bench_planner --plot docs/img  and the picture of docs/planner.md

No GPU is needed: attention/planner/simulation.py is the model.  A block is 64 tokens; work tiles
and the combine cost what was measured of an H100's decode kernel (costs.py).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attention.planner.simulation import combine_time, lower_bound, makespan
from attention.planner.split_plan import SplitPlanSpec
from attention.planner.tuning import PLANNERS
from benchmarks.attention.grids import DISTRIBUTIONS
from benchmarks.attention.plots import svg_figures

COLOURS = {"fa3": "#e09f3e", "greedy": "#8f6bb3", "stream-k": "#0b6e4f"}
PROGRAMS = (78, 108, 132)  # H20, A100, H100: one program an SM
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
BATCHES += (144, 160, 192, 224, 256)
SECOND_WAVES = {1: (17, 19, 27, 34, 45, 50, 67, 80, 100), 8: (2, 6, 9, 12, 17, 20, 24, 34, 40, 51)}
RHO = 2.0
LENGTHS: dict[str, Callable[[random.Random, int], list[int]]] = {
    "equal 4k": lambda rng, rows: [4096] * rows,
    "equal 32k": lambda rng, rows: [32768] * rows,
    "4k +-10 %": lambda rng, rows: [rng.randint(3686, 4506) for _ in range(rows)],
    **DISTRIBUTIONS,
}


@dataclass(frozen=True, slots=True)
class PlannerOutcome:
    """Times over the lower bound of the makespan."""

    makespan: float
    whole: float  # the combine included


def outcomes(lengths: Sequence[int], spec: SplitPlanSpec, rho: float) -> dict[str, PlannerOutcome]:
    """By planner, for a decode step of rows of these lengths."""
    cu_seqlens_q = np.arange(len(lengths) + 1, dtype=np.int32)
    cache_seqlens = np.array(lengths, dtype=np.int32)
    bound = lower_bound(cu_seqlens_q, cache_seqlens, spec, rho)
    found: dict[str, PlannerOutcome] = {}
    for name in COLOURS:
        plan = PLANNERS[name](cu_seqlens_q, cache_seqlens, spec)
        time = makespan(plan, spec, rho)
        found[name] = PlannerOutcome(time / bound, (time + combine_time(plan, spec)) / bound)
    return found


def spec_of(programs: int, kv_heads: int) -> SplitPlanSpec:
    return SplitPlanSpec(
        kv_heads=kv_heads,
        programs=programs,
        block=64,
        work_tile_cost=3,
        merge_cost=1,
        merge_tile_cost=1,
    )


def machine(rho: float) -> str:
    return "bound by programs" if rho == 1.0 else f"bound by memory, rho {rho:g}"


def steps(seeds: int) -> Iterator[tuple[str, int, list[int]]]:
    """(distribution, rows, lengths); random lengths are sampled `seeds` times."""
    for name, lengths in LENGTHS.items():
        for rows in BATCHES:
            for seed in range(1 if name.startswith("equal") else seeds):
                yield name, rows, lengths(random.Random(1000 * seed + rows), rows)


def print_sweep(programs: int, kv_heads: int, rho: float, seeds: int) -> None:
    """Mean and worst of each distribution; the worst with its number of rows."""
    found: dict[str, dict[str, list[tuple[int, PlannerOutcome]]]] = {}
    for name, rows, lengths in steps(seeds):
        for planner, outcome in outcomes(lengths, spec_of(programs, kv_heads), rho).items():
            found.setdefault(name, {}).setdefault(planner, []).append((rows, outcome))
    print(f"\n{programs} programs, {kv_heads} KV heads, {machine(rho)}: makespan over the bound,")
    print("mean / worst (rows), and the mean with the combine")
    print(f"{'':<15}" + "".join(f"{planner:>25}" for planner in COLOURS))
    found["all"] = {
        planner: [result for planners in found.values() for result in planners[planner]]
        for planner in COLOURS
    }
    for name, planners in found.items():
        line = f"{name:<15}"
        for results in planners.values():
            mean = np.mean([outcome.makespan for _, outcome in results])
            worst_rows, worst = max(results, key=lambda result: result[1].makespan)
            whole = np.mean([outcome.whole for _, outcome in results])
            line += f"{mean:>9.3f} /{worst.makespan:5.2f} ({worst_rows:>3}){whole:7.3f}"
        print(line)


def print_published() -> None:
    """The example of the article on wave quantization, and its factor of 1.5."""
    spec = SplitPlanSpec(kv_heads=1, programs=78, block=176, work_tile_cost=0, merge_cost=0)
    print("\n8 query heads and one KV head on 78 SMs, blocks of 176: blocks on the busiest SM,")
    print(
        "and microseconds by the article's own figures, 18 + 6.25 a block (118 and 93, 680 -> 453)"
    )
    for rows, length in ((32, 4096), (20, 36864), (21, 36864), (22, 36864), (23, 36864)):
        line = f"{rows:>4} x {length:<6}"
        cu_seqlens_q = np.arange(rows + 1, dtype=np.int32)
        cache_seqlens = np.full(rows, length, dtype=np.int32)
        for name in COLOURS:
            blocks = makespan(PLANNERS[name](cu_seqlens_q, cache_seqlens, spec), spec)
            line += f"{name:>9}{blocks:>5.0f} ={18 + 6.25 * blocks:>5.0f} us"
        print(line)


def print_second_waves(rho: float) -> None:
    """Equal rows on 132 programs, at the batch sizes where FlashAttention-3 begins a wave."""
    print(f"\nequal rows on 132 programs, {machine(rho)}: makespan over the bound,")
    print(" / ".join(COLOURS))
    for kv_heads, batches in SECOND_WAVES.items():
        for length in (4096, 32768):
            cells: list[str] = []
            for rows in batches:
                found = outcomes([length] * rows, spec_of(132, kv_heads), rho).values()
                cells.append(f"{rows}: " + "/".join(f"{o.makespan:.2f}" for o in found))
            print(f"{kv_heads} KV heads x {length:<6}" + "  ".join(cells))


def plot_waves(folder: Path, seeds: int) -> Path:
    """planner_waves.svg: equal rows, every batch up to the number of programs; and the tables'
    batches, all distributions together."""
    svg_figures()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    plots = figure.subplots(2, len(PROGRAMS), sharey="row")
    for column, programs in enumerate(PROGRAMS):
        equal, mixed = plots[0, column], plots[1, column]
        for name, colour in COLOURS.items():
            style = {"color": colour, "linewidth": 1.2, "label": name}
            equal.plot(*waves(programs, name), **style)
            mixed.plot(*over_distributions(programs, name, seeds), **style)
        equal.set(title=f"{programs} programs", xlabel="rows of 1000 blocks", ylim=(0.95, 2.05))
        mixed.set(xlabel="rows, mean of all distributions", xscale="log", ylim=(0.95, None))
        mixed.set_xticks([1, 4, 16, 64, 256], labels=["1", "4", "16", "64", "256"], minor=False)
        mixed.set_xticks([], minor=True)
        for plot in (equal, mixed):
            plot.grid(alpha=0.3)
    plots[0, 0].set_ylabel("makespan / lower bound")
    plots[1, 0].set_ylabel("the same, combine included")
    plots[0, 0].legend(frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "planner_waves.svg"
    figure.savefig(path, metadata={"Date": None})
    return path


def waves(programs: int, planner: str) -> tuple[list[int], list[float]]:
    """Rows, and the makespan over its bound of so many rows of 1000 blocks."""
    spec = replace(spec_of(programs, 1), work_tile_cost=1)
    rows = list(range(1, programs + 1))
    return rows, [outcomes([64_000] * n, spec, 1.0)[planner].makespan for n in rows]


def over_distributions(programs: int, planner: str, seeds: int) -> tuple[list[int], list[float]]:
    """Rows, and the mean over all distributions, combine included."""
    found: dict[int, list[float]] = {rows: [] for rows in BATCHES}
    for _, rows, lengths in steps(seeds):
        found[rows].append(outcomes(lengths, spec_of(programs, 1), 1.0)[planner].whole)
    return list(BATCHES), [float(np.mean(values)) for values in found.values()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument(
        "--seeds", type=int, default=2, help="samples of random lengths; %(default)s"
    )
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write planner_waves.svg there")
    args = parser.parse_args(argv)
    print_published()
    for rho in (1.0, RHO):
        print_second_waves(rho)
    for kv_heads in (1, 8):
        for programs in PROGRAMS:
            print_sweep(programs, kv_heads, 1.0, args.seeds)
    print_sweep(132, 1, RHO, args.seeds)
    print_sweep(132, 8, RHO, args.seeds)
    if args.plot is not None:
        print(f"\nwrote {plot_waves(args.plot, args.seeds)}")


if __name__ == "__main__":
    main()
