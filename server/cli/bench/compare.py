"""`wavefill bench compare A B`: two servers in turns, and the ratios of each turn."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import orjson

from server.bench.client import ServerError
from server.bench.compare import compare, comparison_table, order_of_turn
from server.bench.metrics import Summary, summarize
from server.cli.bench.options import (
    DEFAULT_CONCURRENCY,
    BenchProgress,
    add_loop_options,
    add_request_options,
    at_least,
    check_request_options,
    measurement,
    reported_arguments,
    sizes,
    with_version,
)

HELP = "two servers in turns, and their ratios"
DESCRIPTION = (
    "Send the same requests to two servers, A and B, in turns (A B, B A, A B, ...), so that what "
    "changes over time favours neither, and print medians and the ratios B / A of the turns with "
    "their lowest and highest.  A server counts as better only if it was in every turn.  While one "
    "is measured, the other has nothing to do."
)
TURNS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in ("a", "b"):
        parser.add_argument(
            name,
            metavar=name.upper(),
            type=with_version,
            help="URL of a server; without a path it gets /v1",
        )
    add_request_options(parser)
    parser.add_argument(
        "--turns", type=at_least(2), default=TURNS, help="how often each server is measured"
    )
    parser.add_argument(
        "--num-prompts", type=at_least(1), default=64, help="requests of each turn to each server"
    )
    add_loop_options(parser)


async def run(args: argparse.Namespace) -> int:
    objectives = check_request_options(args, (args.a, args.b))
    servers = [await measurement(args, url) for url in (args.a, args.b)]
    clients = [server.client() for server in servers]
    total = args.turns * 2 * args.num_prompts
    progress = BenchProgress(total, f"requests, {args.turns} turns")
    turns: list[tuple[Summary, Summary]] = []
    try:
        for server, client in zip(servers, clients, strict=True):
            await server.warm_up(client, args.warmup)
        for turn in range(args.turns):
            found: dict[int, Summary] = {}
            for which in order_of_turn(turn):
                asked = servers[which].at(
                    concurrency=args.concurrency or DEFAULT_CONCURRENCY,
                    rate=args.rate,
                    num_prompts=args.num_prompts,
                    turn=turn + 1,
                )
                measured = await asked.run(clients[which], progress.step)
                found[which] = summarize(measured.outcomes, objectives)
                if found[which].failed:
                    kinds = ", ".join(found[which].errors)
                    raise ServerError(f"{asked.base_url}: {found[which].failed} failed: {kinds}")
            turns.append((found[0], found[1]))
    finally:
        progress.clear()
        for client in clients:
            client.close()
    compared = compare(turns)
    for name, server in zip("AB", servers, strict=True):
        print(f"{name}: {server.workload.model} at {server.base_url}")
    print(f"{args.turns} turns of {args.num_prompts} requests, {sizes(servers[0].workload)}\n")
    print(comparison_table(compared))
    print(
        f"\nbetter: in every turn; of two equal servers 1 figure in {2 ** (args.turns - 1)} says so"
    )
    if args.json is not None:
        figures = {
            "arguments": reported_arguments(args, models=[s.workload.model for s in servers]),
            "figures": compared,
            "turns": [{"a": a, "b": b} for a, b in turns],
        }
        data = orjson.dumps(figures, option=orjson.OPT_INDENT_2)
        await asyncio.to_thread(Path(args.json).write_bytes, data)
    return 0
