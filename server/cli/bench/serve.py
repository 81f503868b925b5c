"""`wavefill bench serve`: one load on one server."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import replace
from pathlib import Path

from server.bench.measure import Measurement
from server.bench.metrics import Objectives, as_json, summarize, table
from server.cli.bench.options import (
    DEFAULT_CONCURRENCY,
    BenchProgress,
    add_loop_options,
    add_request_options,
    add_server_option,
    at_least,
    check_request_options,
    measurement,
    reported_arguments,
    sizes,
)

HELP = "latency and throughput of an OpenAI-compatible server"
DESCRIPTION = (
    "Send random prompts of one length to an OpenAI-compatible server and report latency and "
    "throughput.  A closed loop keeps --concurrency requests open; an open loop sends --rate "
    "requests a second, whatever the server does."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_option(parser)
    add_request_options(parser)
    parser.add_argument(
        "--num-prompts", type=at_least(1), default=100, help="requests that are measured"
    )
    add_loop_options(parser)


async def run(args: argparse.Namespace) -> int:
    objectives = check_request_options(args, (args.base_url,))
    asked = replace(
        await measurement(args, args.base_url),
        num_prompts=args.num_prompts,
        concurrency=args.concurrency or DEFAULT_CONCURRENCY,
        rate=args.rate,
    )
    return await _measure(args, asked, objectives)


async def _measure(args: argparse.Namespace, asked: Measurement, objectives: Objectives) -> int:
    progress = BenchProgress(asked.num_prompts)
    async with asked.client() as client:
        await asked.warm_up(client, args.warmup)
        measured = await asked.run(client, progress.step)
    progress.clear()
    summary = summarize(measured.outcomes, objectives)
    print(table(_title(asked), summary, measured.outcomes, measured.lag_s))
    if args.json is not None:
        arguments = reported_arguments(args, model=asked.workload.model)
        figures = as_json(arguments, summary, measured.lag_s)
        await asyncio.to_thread(Path(args.json).write_bytes, figures)
    return 1 if summary.failed else 0


def _title(asked: Measurement) -> str:
    if asked.rate is not None:
        loop = f"open loop, {asked.rate:g} requests / s"
    else:
        loop = f"closed loop, {asked.concurrency} clients"
    return (
        f"{asked.workload.model} at {asked.base_url}, {asked.workload.endpoint}\n"
        f"{loop}; {sizes(asked.workload)}"
    )
