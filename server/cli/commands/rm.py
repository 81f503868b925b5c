"""`wavefill rm HUB_ID...`: remove downloaded models."""

from __future__ import annotations

import argparse
import shutil
import sys

from server.cli.main import UsageError
from server.cli.model_cache import find, scan, size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Remove models from the local cache of the Hub, with all their revisions.  Asks before, "
        "unless --yes is given."
    )
    parser.add_argument("names", metavar="HUB_ID", nargs="+", help="such as Qwen/Qwen3-0.6B")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask")


def run(args: argparse.Namespace) -> int:
    chosen = find(scan(), args.names)
    if not args.yes and not sys.stdin.isatty():
        raise UsageError("rm asks before it removes, and this is no terminal: add --yes")
    for model in chosen:
        print(f"{model.name}  {size(model.bytes)}  {model.folder}")
    if not args.yes and not _agreed(len(chosen)):
        print("nothing was removed")
        return 1
    # Not by the library's revisions: those of a copy have the commits of the original.
    for model in chosen:
        try:
            shutil.rmtree(model.folder)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            print(f"error: {model.name}: {reason}: check who owns it", file=sys.stderr)
            return 1
    print(f"removed, {size(sum(model.bytes for model in chosen))} freed")
    return 0


def _agreed(count: int) -> bool:
    what = "this model" if count == 1 else f"these {count} models"
    try:
        return input(f"Remove {what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False
