"""`wavefill pull HUB_ID`"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Download a model into the local cache, without pickles."
    parser.add_argument("name", metavar="HUB_ID", help="such as Qwen/Qwen3-0.6B")
    parser.add_argument("--revision", help="branch, tag or commit")


def run(args: argparse.Namespace) -> int:
    from server.cli.main import UsageError
    from server.cli.model_source import HUB_ID, download
    from server.process.logs import set_up_logging

    if not HUB_ID.fullmatch(args.name):
        raise UsageError(f"{args.name}: a Hub id such as Qwen/Qwen3-0.6B is needed")
    set_up_logging("info", "text")
    print(download(args.name, args.revision))
    return 0
