"""The `wavefill` command.  Each subcommand is one file in commands/, imported when it is run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Protocol

COMMANDS = {
    "serve": "start the server",
    "chat": "talk to a running server",
    "bench": "measure a running server",
    "tune": "measure the GPU for the split planners",
    "plan": "say what fits on a GPU, without loading",
    "pull": "download a model from the Hub",
    "version": "print the version",
}


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class UsageError(ValueError):
    """A wrong argument; the message says what, the limit and the remedy."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="wavefill",
        description="OpenAI-compatible inference server for large language models.",
        epilog="wavefill COMMAND --help tells the options of a command.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    chosen = next((word for word in words if not word.startswith("-")), None)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name == chosen:
            _command(name).add_arguments(subparser)
    args = parser.parse_args(words)
    name = "version" if args.version else args.command
    if name is None:
        parser.print_help()
        raise SystemExit(0)
    try:
        raise SystemExit(_command(name).run(args))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _command(name: str) -> Command:
    module: Command = importlib.import_module(f"server.commands.{name}")  # type: ignore[assignment]
    return module
