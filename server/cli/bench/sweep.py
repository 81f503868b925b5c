"""`wavefill bench sweep`: one server under one load after the other, and a report with plots."""

from __future__ import annotations

import argparse
import asyncio
from datetime import UTC, datetime
from pathlib import Path

import orjson

from server.bench.measure import Measurement
from server.bench.metrics import Summary, summarize
from server.bench.report import SweepPoint, sweep_report
from server.cli.bench.options import (
    BenchProgress,
    add_request_options,
    add_server_option,
    at_least,
    check_request_options,
    measurement,
    positive,
    reported_arguments,
    sizes,
)

HELP = "one load after the other, and a report with plots"
DESCRIPTION = (
    "Measure a server with several numbers of clients (--concurrency) or several rates (--rate), "
    "one after the other, and write a report: one HTML file with plots of throughput against time "
    "to first token and inter-token latency, which needs no network."
)
CONCURRENCIES = [1, 2, 4, 8, 16, 32, 64]
PER_CLIENT, MIN_PROMPTS, RATE_SECONDS = 8, 64, 20
HEADS = ("req/s", "out tok/s", "TTFT p50", "p99", "ITL p50", "p99", "good/s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_option(parser)
    add_request_options(parser)
    parser.add_argument(
        "--num-prompts",
        type=at_least(1),
        help=f"requests of each load; left out: {PER_CLIENT} for each client, or "
        f"{RATE_SECONDS} seconds of a rate, and at least {MIN_PROMPTS}",
    )
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency",
        type=at_least(1),
        nargs="+",
        metavar="N",
        help=f"closed loops with these numbers of clients; {' '.join(map(str, CONCURRENCIES))} "
        "if left out",
    )
    loop.add_argument(
        "--rate", type=positive, nargs="+", metavar="X", help="open loops of these rates (Poisson)"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="the report; left out: wavefill-sweep-DATE.html"
    )


async def run(args: argparse.Namespace) -> int:
    objectives = check_request_options(args, (args.base_url,))
    base = await measurement(args, args.base_url)
    loads = load_points(base, args.concurrency, args.rate, args.num_prompts)
    unit = "clients" if args.rate is None else "requests/s"
    title = f"{base.workload.model} at {base.base_url}, {sizes(base.workload)}"
    print(title)
    print(f"{unit:>10}" + "".join(f"{head:>10}" for head in HEADS))
    points: list[SweepPoint] = []
    async with base.client() as client:
        await base.warm_up(client, args.warmup)
        for load in loads:
            value = float(load.concurrency) if load.rate is None else load.rate
            progress = BenchProgress(load.num_prompts, f"{value:g} {unit}")
            measured = await load.run(client, progress.step)
            progress.clear()
            point = SweepPoint(value, summarize(measured.outcomes, objectives))
            points.append(point)
            print(line(point), flush=True)
    arguments = reported_arguments(args, model=base.workload.model)
    html = args.html or f"wavefill-sweep-{datetime.now(UTC):%Y%m%d-%H%M%S}.html"
    text = sweep_report(title, unit, points, arguments)
    await asyncio.to_thread(Path(html).write_text, text, "utf-8")
    if args.json is not None:
        figures = orjson.dumps(
            {"arguments": arguments, "points": points}, option=orjson.OPT_INDENT_2
        )
        await asyncio.to_thread(Path(args.json).write_bytes, figures)
    failed = [f"{p.load:g} {unit}: {reasons(p.summary)}" for p in points if p.summary.failed]
    print("\n".join([*failed, f"report: {html}"]))
    return 1 if failed else 0


def load_points(
    base: Measurement,
    concurrencies: list[int] | None,
    rates: list[float] | None,
    num_prompts: int | None,
) -> list[Measurement]:
    """One measurement a load, each with prompts of its own: none finds another's in a cache."""
    if rates is not None:
        counts = [num_prompts or max(MIN_PROMPTS, round(rate * RATE_SECONDS)) for rate in rates]
        return [
            base.at(concurrency=base.concurrency, rate=rate, num_prompts=count, turn=turn)
            for turn, (rate, count) in enumerate(zip(rates, counts, strict=True), 1)
        ]
    return [
        base.at(
            concurrency=clients,
            rate=None,
            num_prompts=num_prompts or max(MIN_PROMPTS, PER_CLIENT * clients),
            turn=turn,
        )
        for turn, clients in enumerate(concurrencies or CONCURRENCIES, 1)
    ]


def line(point: SweepPoint) -> str:
    summary = point.summary
    cells = [f"{summary.requests_per_s:,.2f}", f"{summary.output_tokens_per_s:,.1f}"]
    for spread in (summary.ttft_ms, summary.itl_ms):
        cells += [f"{v:,.1f}" for v in (spread.p50, spread.p99)] if spread else ["-", "-"]
    good = summary.good_requests_per_s
    cells.append("-" if good is None else f"{good:,.2f}")
    return f"{point.load:>10g}" + "".join(f"{cell:>10}" for cell in cells)


def reasons(summary: Summary) -> str:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in summary.errors.items())
    return f"{summary.failed} requests failed ({kinds})"
