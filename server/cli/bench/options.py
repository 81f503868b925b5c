"""The options that all kinds of `wavefill bench` share, and a Measurement of them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime

from server.bench.client import BenchClient
from server.bench.measure import Measurement
from server.bench.metrics import Objectives
from server.bench.workload import Workload
from server.cli.main import KEY, UsageError, first_key
from server.cli.terminal import ProgressLine

DEFAULT_CONCURRENCY = 8
# Arguments that a file of figures lacks.
UNREPORTED = {"api_key", "command", "version", "what", "html"}


class WithDefaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults of options that have one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        none = action.default is None or action.default is False
        return action.help if none else super()._get_help_string(action)


def add_server_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--base-url",
        "--url",
        metavar="URL",
        type=with_version,
        default="http://127.0.0.1:8000/v1",
        help="where the server is; without a path it gets /v1",
    )


def add_request_options(parser: argparse.ArgumentParser) -> None:
    """What is sent, but not how many at once."""
    add = parser.add_argument
    add("--model", help="name to ask for; the first of /v1/models if left out")
    add("--api-key", help=f"sent as a bearer token; the first of {KEY} if left out")
    add("--endpoint", choices=("completions", "chat"), default="completions", help="what to call")
    add("--input-len", type=at_least(1), default=128, help="tokens (or words) of a prompt")
    add("--output-len", type=at_least(1), default=128, help="largest number of tokens in an answer")
    add(
        "--prompts",
        choices=("ids", "words"),
        help="random token ids (exact length; completions only) or random words; ids for "
        "completions and words for chat if left out",
    )
    add(
        "--vocab-size",
        type=at_least(101),
        default=1000,
        help="random token ids are below this number",
    )
    add("--warmup", type=at_least(0), default=8, help="requests before those that are measured")
    add(
        "--processes",
        type=at_least(1),
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
    add("--timeout", type=positive, default=600.0, help="seconds for one request")
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count the requests within these limits: ttft:200 tpot:20 e2e:5000",
    )
    add("--json", metavar="FILE", help="write the figures there too")


def add_loop_options(parser: argparse.ArgumentParser) -> None:
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency",
        type=at_least(1),
        help=f"closed loop with this many clients; {DEFAULT_CONCURRENCY} if left out",
    )
    loop.add_argument("--rate", type=positive, help="open loop, requests a second (Poisson)")


def check_request_options(args: argparse.Namespace, urls: tuple[str, ...]) -> Objectives:
    """Also takes the key of the environment.  Raises UsageError."""
    if args.endpoint == "chat" and args.prompts == "ids":
        raise UsageError("--prompts ids: chat takes text; use --prompts words")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--base-url {url}: give one like http://127.0.0.1:8000/v1")
    if args.api_key is None:
        args.api_key = first_key(os.environ)
    return read_objectives(args.goodput or [])


async def measurement(args: argparse.Namespace, base_url: str) -> Measurement:
    """Of `base_url`, with the default load.  Raises ServerError if it has no model."""
    ids = (args.prompts or ("words" if args.endpoint == "chat" else "ids")) == "ids"
    async with BenchClient(base_url, args.api_key, args.timeout) as client:
        model = args.model or await client.first_model()
    workload = Workload(
        endpoint=args.endpoint,
        model=model,
        input_len=args.input_len,
        output_len=args.output_len,
        vocab_size=args.vocab_size if ids else None,
        ignore_eos=args.ignore_eos,
        temperature=args.temperature,
        seed=args.seed,
    )
    return Measurement(
        base_url=base_url,
        api_key=args.api_key,
        timeout_s=args.timeout,
        workload=workload,
        num_prompts=1,
        concurrency=DEFAULT_CONCURRENCY,
        rate=None,
        processes=args.processes,
    )


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
            limits[name] = positive(number)
        except (ValueError, argparse.ArgumentTypeError):
            raise UsageError(
                f"--goodput {word}: write ttft:MS, tpot:MS or e2e:MS, such as ttft:200"
            ) from None
    return Objectives(**limits)


def sizes(workload: Workload) -> str:
    unit = "words" if workload.vocab_size is None else "tokens"
    return f"{workload.input_len} {unit} in, {workload.output_len} tokens out"


def reported_arguments(args: argparse.Namespace, **changes: object) -> dict[str, object]:
    """The arguments for a file of figures, with the date and without keys."""
    arguments: dict[str, object] = {
        name: value for name, value in vars(args).items() if name not in UNREPORTED
    }
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return arguments | changes | {"date": date}


class BenchProgress:
    """A bar with `12 / 100` on a terminal, nothing elsewhere."""

    def __init__(self, total: int, what: str = "") -> None:
        self._total, self._what = total, what
        self._done = 0
        self._line = ProgressLine(sys.stderr)

    def step(self) -> None:
        self._done += 1
        text = f"{self._done} / {self._total}  {self._what}".rstrip()
        self._line.show(text, self._done / self._total)

    def clear(self) -> None:
        self._line.clear()


def at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"{text}: a whole number from {lowest} on is needed")
        return int(text)

    return number


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text}: a number above 0 is needed")
    return number
