"""`wavefill completion SHELL`: a script with which a shell completes commands and options."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from server.cli.main import COMMANDS, build_parser

SHELLS = ("bash", "zsh", "fish")
DOWNLOADED = "wavefill ls --names 2>/dev/null"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print a script that completes commands, options and their values when Tab is pressed.  "
        'Now: eval "$(wavefill completion bash)"; in every new shell: write it where the shell '
        "looks for such scripts, see docs/cli.md."
    )
    parser.add_argument("shell", choices=SHELLS, help="the shell that it is for")


def run(args: argparse.Namespace) -> int:
    import shtab

    parser, _ = build_parser(COMMANDS)
    for action in _all_actions(parser):
        _describe(action)
    print(shtab.complete(parser, args.shell))
    return 0


def _all_actions(parser: Any) -> Iterator[Any]:
    """Of the command and of those below it.  argparse has no public names for them."""
    for action in parser._actions:
        yield action
        if hasattr(action, "_choices_actions"):  # it has commands
            for listed in action._choices_actions:
                below = action.choices[listed.dest]
                below.description = listed.help  # one line, which zsh and fish show
                yield from _all_actions(below)


def _describe(action: Any) -> None:
    """Say what completes the value, by what --help calls it."""
    import shtab

    values = {
        "FILE": shtab.FILE,
        "DIRECTORY": shtab.DIRECTORY,
        "MODEL": shtab.DIRECTORY,
        "HUB_ID": shtab.cmd(DOWNLOADED),
    }
    name = action.metavar
    if not isinstance(name, str):
        return
    if name.startswith("{"):  # choices that flags.py checks, not argparse
        action.choices = name[1:-1].split(",")
    elif name in values:
        action.complete = values[name]
