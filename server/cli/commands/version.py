"""`wavefill version`"""

from __future__ import annotations

import argparse
from importlib.metadata import version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the version."


def run(args: argparse.Namespace) -> int:
    print(f"wavefill {version('wavefill')}")
    return 0
