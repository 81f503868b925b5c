"""`wavefill bench serve`"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from server.bench.client import BenchClient, ServerError
from server.bench.metrics import Objectives, as_json, summarize, table
from server.bench.share import Load, Share, run_loop, run_together, shares
from server.bench.workload import Workload
from server.cli.main import KEY, UsageError, first_key

DEFAULT_CONCURRENCY = 8
UNREPORTED = {"api_key", "command", "version", "what"}  # arguments that a file of figures lacks


class WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        none = action.default is None or action.default is False
        return action.help if none else super()._get_help_string(action)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure a running server."
    subparsers = parser.add_subparsers(metavar="WHAT", dest="what", required=True)
    serve = subparsers.add_parser(
        "serve",
        help="latency and throughput of an OpenAI-compatible server",
        formatter_class=WithDefaults,
        description="Send random prompts of one length to an OpenAI-compatible server and report "
        "latency and throughput.  A closed loop keeps --concurrency requests open; an open loop "
        "sends --rate requests a second, whatever the server does.",
    )
    add = serve.add_argument
    add(
        "--base-url",
        "--url",
        metavar="URL",
        type=with_version,
        default="http://127.0.0.1:8000/v1",
        help="where the server is; without a path it gets /v1",
    )
    add("--model", help="name to ask for; the first of /v1/models if left out")
    add("--api-key", help=f"sent as a bearer token; the first of {KEY} if left out")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="what to call")
    add("--input-len", type=_at_least(1), default=128, help="tokens (or words) of a prompt")
    add(
        "--output-len", type=_at_least(1), default=128, help="largest number of tokens in an answer"
    )
    add(
        "--prompts",
        choices=("ids", "words"),
        help="random token ids (exact length; completions only) or random words; ids for "
        "completions and words for chat if left out",
    )
    add(
        "--vocab-size",
        type=_at_least(101),
        default=1000,
        help="random token ids are below this number",
    )
    add("--num-prompts", type=_at_least(1), default=100, help="requests that are measured")
    add("--warmup", type=_at_least(0), default=8, help="requests before them")
    loop = serve.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency",
        type=_at_least(1),
        help=f"closed loop with this many clients; {DEFAULT_CONCURRENCY} if left out",
    )
    loop.add_argument("--rate", type=_positive, help="open loop, requests a second (Poisson)")
    add(
        "--processes",
        type=_at_least(1),
        default=1,
        help="processes that send and read; one can read about 100,000 tokens a second",
    )
    add(
        "--ignore-eos",
        action="store_true",
        help="make every answer exactly --output-len tokens long",
    )
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--seed", type=int, default=0, help="of prompts and arrivals")
    add("--timeout", type=_positive, default=600.0, help="seconds for one request")
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count the requests within these limits: ttft:200 tpot:20 e2e:5000",
    )
    add("--json", metavar="FILE", help="write the figures there too")


def run(args: argparse.Namespace) -> int:
    if args.endpoint == "chat" and args.prompts == "ids":
        raise UsageError("--prompts ids: chat takes text; use --prompts words")
    if not args.base_url.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {args.base_url}: give one like http://127.0.0.1:8000/v1")
    objectives = read_objectives(args.goodput or [])
    if args.api_key is None:
        args.api_key = first_key(os.environ)
    try:
        return run_loop(_measure(args, objectives))
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def with_version(url: str) -> str:
    """A server's address is enough, as for `wavefill chat`."""
    url = url.rstrip("/")
    _, found, rest = url.partition("://")
    return f"{url}/v1" if found and "/" not in rest else url


def read_objectives(words: list[str]) -> Objectives:
    """`ttft:200 tpot:20` as limits.  Raises UsageError."""
    limits: dict[str, float] = {}
    for word in words:
        name, _, number = word.partition(":")
        try:
            if name not in ("ttft", "tpot", "e2e"):
                raise ValueError
            limits[name] = _positive(number)
        except (ValueError, argparse.ArgumentTypeError):
            raise UsageError(
                f"--goodput {word}: write ttft:MS, tpot:MS or e2e:MS, such as ttft:200"
            ) from None
    return Objectives(**limits)


async def _measure(args: argparse.Namespace, objectives: Objectives) -> int:
    async with BenchClient(args.base_url, args.api_key, args.timeout) as client:
        workload = await _workload(args, client)
        progress = BenchProgress(args.num_prompts)
        concurrency = args.concurrency or DEFAULT_CONCURRENCY
        warm = Load(client, workload, lambda: None)
        if failure := await warm.warm_up(args.warmup, concurrency):
            raise ServerError(f"warm-up: {failure.kind}: {failure.message}")
        whole = Share(
            base_url=args.base_url,
            api_key=args.api_key,
            timeout_s=args.timeout,
            workload=workload,
            indices=range(args.num_prompts),
            concurrency=concurrency,
            rate=args.rate,
        )
        split = shares(whole, args.processes)
        if len(split) > 1:
            measured = await asyncio.to_thread(run_together, split)
        else:
            load = Load(client, workload, progress.step)
            measured = await whole.run(load, time.perf_counter())
    progress.clear()
    summary = summarize(measured.outcomes, objectives)
    print(table(_title(args, workload), summary, measured.outcomes, measured.lag_s))
    if args.json is not None:
        figures = as_json(_reported_arguments(args, workload), summary, measured.lag_s)
        await asyncio.to_thread(Path(args.json).write_bytes, figures)
    return 1 if summary.failed else 0


async def _workload(args: argparse.Namespace, client: BenchClient) -> Workload:
    ids = (args.prompts or ("words" if args.endpoint == "chat" else "ids")) == "ids"
    return Workload(
        endpoint=args.endpoint,
        model=args.model or await client.first_model(),
        input_len=args.input_len,
        output_len=args.output_len,
        vocab_size=args.vocab_size if ids else None,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        seed=args.seed,
    )


class BenchProgress:
    """`12 / 100` in place on a terminal, nothing elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._enabled = sys.stderr.isatty()

    def step(self) -> None:
        self._done += 1
        if self._enabled:
            print(f"\r{self._done} / {self._total}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._enabled:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _title(args: argparse.Namespace, workload: Workload) -> str:
    unit = "words" if workload.vocab_size is None else "tokens"
    if args.rate is not None:
        loop = f"open loop, {args.rate:g} requests / s"
    else:
        loop = f"closed loop, {args.concurrency or DEFAULT_CONCURRENCY} clients"
    return (
        f"{workload.model} at {args.base_url}, {workload.endpoint}\n"
        f"{loop}; {workload.input_len} {unit} in, {workload.output_len} tokens out"
    )


def _reported_arguments(args: argparse.Namespace, workload: Workload) -> dict[str, object]:
    arguments: dict[str, object] = {
        name: value for name, value in vars(args).items() if name not in UNREPORTED
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return arguments | {"model": workload.model, "date": date}


def _at_least(lowest: int) -> Any:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text}: a whole number from {lowest} on is needed")
        return int(text)

    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: a number above 0 is needed")
    return number
