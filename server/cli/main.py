"""The `wavefill` command.  Each subcommand is one file in commands/, imported when it is run."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn, Protocol, cast

COMMANDS = {
    "serve": "start the server",
    "chat": "talk to a model, of a running server or a new one",
    "bench": "measure a running server",
    "tune": "measure this GPU for the attention planner",
    "plan": "estimate what fits on a GPU, without loading",
    "formats": "say how a model's layers are stored, and how they run",
    "pull": "download a model from the Hub",
    "ls": "list the models that were downloaded",
    "rm": "remove downloaded models",
    "config": "print the settings of a server, and where they come from",
    "doctor": "check what a server needs of this machine",
    "completion": "print what completes commands and options in a shell",
    "version": "print the version",
}
KEY = "WAVEFILL_API_KEY"  # the keys of a server, with commas between them


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


class UsageError(ValueError):
    """A wrong argument; the message says what, the limit and the remedy."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with one-line errors and without abbreviated options."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")
        names, ignored, _ = text.partition(": ignored explicit argument")
        if ignored:
            text = f"{names} takes no value"
        raise UsageError(f"{text}: see `{self.prog} --help`")

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """argparse would still take -t for -tp, and -hf MODEL for -h."""
        return []

    def options(self) -> list[str]:
        """The names of all options, without those that only name their replacement."""
        names: list[str] = []
        for action in self._actions:
            choices: object = action.choices
            if isinstance(choices, dict):  # the commands of a command
                parsers = cast("dict[str, Parser]", choices)
                names += [name for each in parsers.values() for name in each.options()]
            elif action.help != argparse.SUPPRESS:
                names += action.option_strings
        return names


def first_key(environment: Mapping[str, str]) -> str:
    """The key that the client commands send, without its name; "" if none is set."""
    keys = (key.split() for key in environment.get(KEY, "").split(","))
    return next((words[-1] for words in keys if words), "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    open_closed_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        raise SystemExit(_run(words))
    except UsageError as error:
        from runtime.logs import print_error

        print_error(str(error))
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except BrokenPipeError:  # of `wavefill ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None  # as if SIGPIPE had ended it


def open_closed_streams() -> None:
    """Let stdin, stdout and stderr lead nowhere where the caller has closed them, as in `2>&-`.

    Else the next file or socket would be one of them, for this process and its children.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
            os.set_inheritable(opened, True)
            setattr(sys, name, os.fdopen(opened, "r" if name == "stdin" else "w", closefd=False))


def build_parser(commands: Collection[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser and those of all commands, of which only `commands` are imported."""
    parser = Parser(
        prog="wavefill",
        description="OpenAI-compatible inference server for large language models.",
        epilog="wavefill COMMAND --help lists the options of a command.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    subparsers = parser.add_subparsers(metavar="COMMAND", dest="command")
    parsers = {name: subparsers.add_parser(name, help=text) for name, text in COMMANDS.items()}
    for name in commands:
        _command(name).add_arguments(parsers[name])
    return parser, parsers


def _run(words: list[str]) -> int:
    chosen = next((word for word in words if not word.startswith("-")), "")
    if words and words[0] == chosen and chosen not in COMMANDS:
        from server.cli.vllm_flags import OTHER_COMMANDS

        near = [OTHER_COMMANDS.get(chosen), *difflib.get_close_matches(chosen, COMMANDS, n=1)]
        meant = next(filter(None, near), None)
        remedy = f"did you mean `wavefill {meant}`?" if meant else "see `wavefill --help`"
        raise UsageError(f"wavefill {chosen}: no such command: {remedy}")
    parser, parsers = build_parser([chosen] if chosen in COMMANDS else [])
    used = parsers.get(chosen, parser)
    args, strange = parser.parse_known_args(words)
    if strange:
        from server.cli.vllm_flags import refusal

        raise UsageError(refusal(strange, used.options(), used.prog))
    name = "version" if args.version else args.command
    if name is None:
        parser.print_help()
        return 0
    return _command(name).run(args)


def _command(name: str) -> Command:
    return cast(Command, importlib.import_module(f"server.cli.commands.{name}"))
