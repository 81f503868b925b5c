"""Latency and throughput of chunked prefill policies, on simulated devices.

    python -m benchmarks.schedule.bench_schedule                    Qwen3-8B on an H100 and an H200
    python -m benchmarks.schedule.bench_schedule --devices h200 --loads c128 --targets 15 25
    python -m benchmarks.schedule.bench_schedule --devices all --policies wavefill vllm sglang

The scheduler and its step time model are the real ones; a device is a clock that advances by the
time of a step (device_model.py), and the loads are closed loops of clients, Poisson arrivals at a
share of the capacity, and bursts (traffic.py).  With other policies beside Wavefill's, it counts
the loads at which one of them is preferable: at least as good in tokens a second, TTFT p50 and p99
and ITL p99, within 5 %, and 10 % better in one of them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import NamedTuple

from benchmarks.schedule.device_model import DEVICES
from benchmarks.schedule.policies import POLICIES
from benchmarks.schedule.simulation import Percentiles, capacity, simulate_load
from benchmarks.schedule.traffic import LOADS, LoadSpec

AS_GOOD, BETTER = 0.95, 1.10
FIGURES = ("tokens_per_second", "ttft_p50", "ttft_p99", "itl_p99")


class Cell(NamedTuple):
    device: str
    load: int  # an index of LOADS
    policy: str
    target_ms: float
    whole: bool


@cache
def _capacity(device: str, load: int) -> float:
    return capacity(DEVICES[device], LOADS[load])


def run_cell(cell: Cell) -> Percentiles:
    spec = LOADS[cell.load]
    per_second = _capacity(cell.device, cell.load) if spec.share else 0.0
    return simulate_load(
        DEVICES[cell.device], spec, cell.policy, per_second,
        whole=cell.whole, target_ms=cell.target_ms,
    )  # fmt: skip


def ratios(one: Percentiles, other: Percentiles) -> dict[str, float]:
    """How many times better `one` is than `other` in each of FIGURES."""
    found = {"tokens_per_second": one.tokens_per_second / other.tokens_per_second}
    for name in FIGURES[1:]:
        found[name] = getattr(other, name) / max(getattr(one, name), 1e-9)
    return found


def preferable(one: Percentiles, other: Percentiles) -> bool:
    """Whether `one` is as good as `other` in all figures, and better in one."""
    found = ratios(one, other).values()
    return min(found) >= AS_GOOD and max(found) >= BETTER


def heading() -> str:
    return (
        f"{'device':<11} {'load':<24} {'policy':<9} {'target':>6} {'out tok/s':>9} "
        f"{'TTFT p50':>9} {'p99':>7} {'ITL p50':>8} {'p99':>7} {'chunk':>6}"
    )


def row(cell: Cell, figures: Percentiles) -> str:
    target = f"{cell.target_ms:g}" if cell.target_ms else "auto"
    return (
        f"{cell.device:<11} {LOADS[cell.load].name:<24} {cell.policy:<9} {target:>6} "
        f"{figures.tokens_per_second:>9.0f} {figures.ttft_p50:>9.0f} {figures.ttft_p99:>7.0f} "
        f"{figures.itl_p50:>8.1f} {figures.itl_p99:>7.1f} {figures.largest_chunk:>6}"
    )


def comparison(results: dict[Cell, Percentiles], policy: str) -> str:
    """Where `policy` is preferable to Wavefill's, and Wavefill's worst ratio in each figure."""
    pairs = [
        (cell, figures, results[cell._replace(policy=policy)])
        for cell, figures in results.items()
        if cell.policy == "wavefill"
    ]
    lost = [cell for cell, own, other in pairs if preferable(other, own)]
    won = [cell for cell, own, other in pairs if preferable(own, other)]
    lines = [
        f"{policy}: preferable at {len(lost)} of {len(pairs)} loads, "
        f"Wavefill preferable at {len(won)}"
    ]
    lines += [f"    {cell.device} {LOADS[cell.load].name}" for cell in lost]
    for name in FIGURES:
        worst, cell = min((ratios(own, other)[name], cell) for cell, own, other in pairs)
        where = f"{cell.device} {LOADS[cell.load].name}"
        lines.append(f"    worst ratio of {name:<17} {worst:.2f} ({where})")
    return "\n".join(lines)


def cells_of(arguments: argparse.Namespace) -> Iterable[Cell]:
    devices = list(DEVICES) if "all" in arguments.devices else arguments.devices
    for device in devices:
        for index, spec in enumerate(LOADS):
            if arguments.loads and not _chosen(spec, arguments.loads):
                continue
            for policy in arguments.policies:
                targets = arguments.targets if policy == "wavefill" else [0.0]
                for target in targets:
                    yield Cell(device, index, policy, target, arguments.whole)


def _chosen(spec: LoadSpec, names: list[str]) -> bool:
    return any(spec.name == name or spec.name.startswith(f"{name} ") for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", nargs="+", choices=[*DEVICES, "all"], default=["h100", "h200"])
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=["wavefill"])
    parser.add_argument("--loads", nargs="+", help="the first words of their names", default=[])
    parser.add_argument("--targets", type=float, nargs="+", default=[0.0], help="ms; 0: automatic")
    parser.add_argument(
        "--whole", action="store_true", help="measure from the first request to the last answer"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    for name in arguments.loads:
        if not any(_chosen(spec, [name]) for spec in LOADS):
            parser.error(
                f"--loads: no load begins with {name!r}: {', '.join(s.name for s in LOADS)}"
            )
    print(heading())
    results: dict[Cell, Percentiles] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        cells = list(cells_of(arguments))
        for cell, figures in zip(cells, pool.map(run_cell, cells), strict=True):
            results[cell] = figures
            print(row(cell, figures), flush=True)
    if "wavefill" in arguments.policies:
        for policy in arguments.policies:
            if policy != "wavefill":
                print(comparison(results, policy))


if __name__ == "__main__":
    main()
