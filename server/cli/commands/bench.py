"""`wavefill bench serve`, `sweep` and `compare`"""

from __future__ import annotations

import argparse
import sys

from server.bench.client import ServerError
from server.bench.share import run_loop
from server.cli.bench import compare, serve, sweep
from server.cli.bench.options import WithDefaults

KINDS = {"serve": serve, "sweep": sweep, "compare": compare}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure running servers."
    subparsers = parser.add_subparsers(metavar="WHAT", dest="what", required=True)
    for name, kind in KINDS.items():
        kind.add_arguments(
            subparsers.add_parser(
                name,
                help=kind.HELP,
                description=kind.DESCRIPTION,
                formatter_class=WithDefaults,
            )
        )


def run(args: argparse.Namespace) -> int:
    try:
        return run_loop(KINDS[args.what].run(args))
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
