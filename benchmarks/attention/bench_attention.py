"""Attention kernels on a GPU: microseconds, bandwidth and TFLOP/s, with peers and targets.

    python -m benchmarks.attention.bench_attention                         everything, a few minutes
    python -m benchmarks.attention.bench_attention --grid decode,b1,skewed --fa3 _vllm_fa3_C.abi3.so
    python -m benchmarks.attention.bench_attention --grid prefill --sdpa --out results
    python -m benchmarks.attention.bench_attention --grid decode --subjects ours,FA3 --isolated
    python -m benchmarks.attention.bench_attention --plot results/attention.json --out docs/img

Times are medians of CUDA-graph replays on random numbers, over shuffled pages, combine included.
Cold: calls cycle through KV sets of 400 MiB in all; warm: one set.  Shares refer to the read
bandwidth measured in the same run.  Plans are precomputed and timed separately (--grid plan).  Each
result is compared with the row's first one; one that differs is reported as wrong, without a time.

Calls run back to back as layers do, and kernels with programmatic dependent launch overlap:
Hopper's decode kernel fills its stages, 64 KiB per SM, while the combine of the previous call still
runs.  In a model it does so during the preceding write_kv.  With --isolated a kernel without
dependent launch separates the calls of every subject, and its own time is subtracted: nothing
overlaps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from benchmarks.attention.baselines import contiguous_attention, flash_attention_3, load_fa3
from benchmarks.attention.cases import AttentionCase
from benchmarks.attention.grids import GRIDS, cases_of
from benchmarks.attention.inputs import RandomPool
from benchmarks.attention.measure import measure, why
from benchmarks.attention.plans import measure_plans
from benchmarks.attention.plots import plot
from benchmarks.attention.results import (
    FA3,
    FA3_PLAN,
    GREEDY_PLAN,
    OURS,
    PLAIN,
    CaseResult,
    complaints,
    header,
    line,
)
from benchmarks.attention.subjects import Subject, back_end, kernels
from benchmarks.attention.targets import predictions, verdicts
from benchmarks.attention.timing import (
    Bandwidth,
    GraphTimer,
    Timer,
    isolated_timer,
    measure_bandwidth,
)

PLAN = "plan"
PLAN_SUBJECTS = {"stream-k": PLAIN, "greedy": GREEDY_PLAN, "fa3": FA3_PLAN}
DECODE_GRIDS = ("decode", "b1", "tp8", "small", "skewed", "features", "fp8", "flat")
ONE_PLAN = ("features", "fp8", "flat")  # of these: planners are not compared there
SUBJECTS = (OURS, *PLAN_SUBJECTS.values(), "flash2", "flash1", "mha", FA3, "cuDNN", "FA2")


def subjects_of(grid: str, options: argparse.Namespace) -> dict[str, Subject]:
    """The subjects of a grid, ours first."""
    subjects: dict[str, Subject] = {}
    if grid == "seeds":
        subjects |= {name: back_end(name) for name in ("flash2", "flash1", "mha")}
    else:
        subjects[OURS] = kernels("stream-k")
    if grid in ("prefill", "chunked", "mixed", "fp8", "flat"):
        subjects[PLAIN] = kernels("stream-k", plain=True)
    if grid in DECODE_GRIDS and grid not in ONE_PLAN:
        subjects |= {
            PLAN_SUBJECTS[planner]: kernels(planner, plain=True) for planner in options.planner
        }
    if grid == "mixed":
        subjects["flash2"] = back_end("flash2")
    if options.fa3:
        subjects[FA3] = flash_attention_3
    if options.sdpa and grid == "prefill":
        subjects["cuDNN"] = contiguous_attention(SDPBackend.CUDNN_ATTENTION)
        subjects["FA2"] = contiguous_attention(SDPBackend.FLASH_ATTENTION)
    return {name: subject for name, subject in subjects.items() if name in options.subjects}


def run_grids(
    options: argparse.Namespace, pool: RandomPool, timer: Timer, bandwidth: Bandwidth
) -> list[CaseResult]:
    """Measure and print the grids; an interrupt or a kernel that breaks the device ends early."""
    rows: list[CaseResult] = []
    try:
        for grid in options.grid:
            if grid != PLAN:
                run_grid(grid, options, pool, timer, bandwidth, rows)
    except (KeyboardInterrupt, RuntimeError) as error:
        print(f"\nended early, what follows is about the cases so far: {why(error)}")
    return rows


def run_grid(
    grid: str,
    options: argparse.Namespace,
    pool: RandomPool,
    timer: Timer,
    bandwidth: Bandwidth,
    rows: list[CaseResult],
) -> None:
    """Measure and print one grid's cases and add them to rows."""
    decode = grid in DECODE_GRIDS
    subjects = subjects_of(grid, options)
    if not subjects:
        return
    print(f"\n{grid}: {(GRIDS[grid].__doc__ or '').splitlines()[0]}")
    print(header(subjects, decode))
    began = time.perf_counter()
    for case in selected_cases([grid], options):
        row = measure(case, subjects, pool, timer)
        print(line(row, subjects, bandwidth, decode), *complaints(row), sep="\n", flush=True)
        rows.append(row)
    print(f"({grid}: {time.perf_counter() - began:.0f} s)")


def selected_cases(grids: Sequence[str], options: argparse.Namespace) -> list[AttentionCase]:
    """The cases of the grids, with another page size where --page asks for one."""
    grids = [grid for grid in grids if grid != PLAN]
    cases = cases_of(grids, options.cases)
    if options.page:
        cases = [
            case if "page" in case.name else replace(case, page=options.page) for case in cases
        ]
    return cases


def described(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "command": "python -m benchmarks.attention.bench_attention " + " ".join(sys.argv[1:]),
        "page": options.page or 16,
        "replays": options.replays,
        "isolated": options.isolated,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the selected grids -> the results that are written as JSON."""
    device = torch.device("cuda")
    about = described(device, options)
    timer = GraphTimer(options.replays)
    pool = RandomPool(device)
    pool.reserve(selected_cases(options.grid, options))
    data = torch.randn(1 << 30, device=device, dtype=torch.bfloat16)
    bandwidth = measure_bandwidth(data, timer)
    print(f"{about['device']}, torch {about['torch']}: read {bandwidth.read:.3f} TB/s, ", end="")
    print(f"copy {bandwidth.copy:.3f} TB/s read and written")
    plan_us = measure_plans(device, timer, options.planner) if PLAN in options.grid else {}
    rows = run_grids(
        options, pool, isolated_timer(options.replays) if options.isolated else timer, bandwidth
    )
    after = bandwidth
    with contextlib.suppress(RuntimeError):  # a broken kernel may have taken the device along
        after = measure_bandwidth(data, timer)
    print(f"\nafterwards: read {after.read:.3f} TB/s, copy {after.copy:.3f} TB/s")
    targets = verdicts(rows, bandwidth, plan_us)
    predicted = list(predictions(rows))
    print(*predicted, *targets, sep="\n")
    return {
        "about": about,
        "read_tb_s": [bandwidth.read, after.read],
        "copy_tb_s": [bandwidth.copy, after.copy],
        "plan_us": plan_us,
        "rows": [row.to_json() for row in rows],
        "predictions": predicted,
        "targets": [str(verdict) for verdict in targets],
    }


def _chosen(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            message = f"unknown {', '.join(unknown)}: choose from {','.join(known)}"
            raise argparse.ArgumentTypeError(message)
        return names

    return parse


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    grids = [*GRIDS, PLAN]
    planners = list(PLAN_SUBJECTS)
    parser.add_argument(
        "--grid", type=_chosen(grids), default=grids, metavar="A,B", help=",".join(grids)
    )
    parser.add_argument(
        "--planner",
        type=_chosen(planners),
        default=planners,
        metavar="A,B",
        help=",".join(planners),
    )
    parser.add_argument(
        "--subjects",
        type=_chosen(SUBJECTS),
        default=list(SUBJECTS),
        metavar="A,B",
        help="of those that a grid has: " + ",".join(SUBJECTS),
    )
    parser.add_argument("--page", type=int, choices=(16, 32, 64, 128), help="of all cases")
    parser.add_argument(
        "--replays", type=int, default=50, help="of each graph, fewer where they are long"
    )
    parser.add_argument("--isolated", action="store_true", help="no overlap of calls, see above")
    parser.add_argument("--cases", type=int, metavar="N", help="of each grid, spread over it")
    parser.add_argument("--fa3", metavar="FILE", help="also FlashAttention-3, from this library")
    parser.add_argument("--sdpa", action="store_true", help="also torch's cuDNN and FA2 prefill")
    parser.add_argument("--out", type=Path, metavar="DIR", help="attention.json and plots")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="only plot an earlier run")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse_options()
    if options.plot:
        results = json.loads(options.plot.read_text())
    else:
        if not torch.cuda.is_available():
            raise SystemExit("error: bench_attention times kernels on a GPU, and torch finds none")
        if options.fa3:
            load_fa3(options.fa3)
        results = run(options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        if not options.plot:
            (options.out / "attention.json").write_text(json.dumps(results, indent=1))
        print(*plot(results, options.out), sep="\n")


if __name__ == "__main__":
    main()
