"""`wavefill chat [MODEL]`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from server.cli.chat.client import ChatServer, ChatServerError
from server.cli.chat.own_server import OwnServer
from server.cli.chat.prompt_line import PROMPT, PromptLine
from server.cli.chat.session import COMMANDS, Session, banner
from server.cli.config_file import add_config_argument
from server.cli.flags import (
    add_engine_flags,
    add_model_arguments,
    flag_of,
    read_config_file,
    read_engine_flags,
)
from server.cli.main import KEY, UsageError, first_key
from server.cli.model_source import find_local

DEFAULT_URL = "http://127.0.0.1:8000"
FIND_SECONDS = 2.0  # for a server that may run at the default address
NOT_NOW = (401, 403, 503)  # what a server answers that has its model, or loads it
# Of a server that is started; the environment and --config set all others.
FLAGS = (
    *("device", "dtype", "kv_dtype", "load_format", "max_model_len"),
    *("kv_tokens", "gpu_memory", "threads"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "wavefill chat [MODEL] [OPTIONS]"
    parser.description = (
        f"Talk to a model.  If a server answers at {DEFAULT_URL} and has MODEL, it is used; "
        "if not, one is started for this chat and stopped at its end.  In the chat, /help lists "
        f"the commands.  If the server asks for a key, set {KEY}."
    )
    add_model_arguments(parser)
    add_config_argument(parser)
    parser.add_argument(
        "--base-url",
        "--url",
        metavar="URL",
        help=f"a server that runs, with or without the /v1; none is started then (default: "
        f"{DEFAULT_URL} if one answers there)",
    )
    parser.add_argument(
        "--model",
        dest="served_name",
        default="",
        metavar="NAME",
        help="name of the model on that server (default: its first)",
    )
    parser.add_argument("--system", default="", metavar="TEXT", help="instructions for the model")
    parser.add_argument("--temperature", type=float, help="left out: the model's own")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of an answer; left out: as many as fit"
    )
    parser.add_argument(
        "--think",
        action=argparse.BooleanOptionalAction,
        help="ask for reasoning or for none, of models that have the switch",
    )
    parser.add_argument(
        "--tools",
        metavar="FILE",
        help="tools that the model may call, as a JSON list; the chat asks you what they return",
    )
    add_engine_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    options = request_options(args)
    if args.model and args.base_url:
        raise UsageError(
            "MODEL and --base-url: a server that runs has its models: use --model NAME, or leave "
            "--base-url out to start a server"
        )
    with contextlib.ExitStack() as stack:
        try:
            server, models, at = _find_or_start(args, stack)
            if not models or (args.served_name and args.served_name not in models):
                raise ChatServerError(
                    f"--model {args.served_name}: the server has {', '.join(models) or 'none'}"
                )
        except ChatServerError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        model = args.served_name or models[0]
        print(banner(model, at))
        line = stack.enter_context(PromptLine(COMMANDS))
        session = Session(server, model, line.read, options, args.system)
        converse(session, line)
    return 1 if session.failed and not sys.stdin.isatty() else 0  # a script reads nothing else


def converse(session: Session, line: PromptLine) -> None:
    """Until /exit or the end of the input.  Ctrl-C drops what is being typed."""
    while True:
        try:
            if not session.take(line.read(PROMPT)):
                return
        except EOFError:
            if sys.stdin.isatty():
                print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit ends the chat)")


def _find_or_start(
    args: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[ChatServer, list[str], str]:
    """The server, its models and where it is.  Raises ChatServerError."""
    key = first_key(os.environ)
    if args.base_url:
        server = ChatServer(args.base_url, key)
        return server, server.models(), args.base_url
    served = _served_as(args.model) if args.model else args.served_name
    server = ChatServer(DEFAULT_URL, key)
    try:
        models = server.models(FIND_SECONDS)
    except ChatServerError as error:
        if error.status in NOT_NOW:  # it has the memory that another one would need
            raise ChatServerError(f"{DEFAULT_URL}: {error}") from None
        models = []
    if models and (not served or served in models):
        return server, [served or models[0]], DEFAULT_URL
    if args.served_name:
        raise ChatServerError(
            f"--model {args.served_name}: no server at {DEFAULT_URL} has it: give --base-url, or "
            "`wavefill chat MODEL` to start one"
        )
    own = stack.enter_context(OwnServer(serve_arguments(args)))
    server = own.start()
    return server, server.models(), f"{own.url}, started for this chat"


def _served_as(model: str) -> str:
    """The name under which a server of `model` has it.  Raises UsageError."""
    found = find_local(model)
    return model if found is None else found[1]


def serve_arguments(args: argparse.Namespace) -> list[str]:
    """For the server that is started.  Raises UsageError for a wrong one, before it is."""
    set_here = read_engine_flags(args, {}, FLAGS)
    read_config_file(args, os.environ)
    words = [args.model] if args.model else []
    for option, text in (("--revision", args.revision), ("--config", args.config)):
        words += [option, text] if text else []
    for name, value in set_here.items():
        words += [flag_of(name), str(value)]
    return words


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of every request that options set.  Raises UsageError."""
    options: dict[str, Any] = {}
    if args.temperature is not None:
        if not 0 <= args.temperature <= 2:
            raise UsageError(f"--temperature {args.temperature:g}: choose from 0 to 2")
        options["temperature"] = args.temperature
    if args.max_tokens is not None:
        if args.max_tokens < 1:
            raise UsageError(f"--max-tokens {args.max_tokens}: choose at least 1")
        options["max_tokens"] = args.max_tokens
    if args.think is not None:
        options["chat_template_kwargs"] = {"enable_thinking": args.think}
    if args.tools:
        options["tools"] = read_tools(args.tools)
    return options


def read_tools(name: str) -> list[Any]:
    """Raises UsageError."""
    try:
        tools = json.loads(Path(name).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--tools {name}: {error.strerror}: give a JSON file") from None
    except ValueError as error:
        raise UsageError(f"--tools {name}: not JSON ({error}): correct the file") from None
    if not isinstance(tools, list) or not tools:
        raise UsageError(
            f"--tools {name}: a JSON list is needed, as `tools` of a request: "
            '[{"type": "function", "function": {...}}]'
        )
    return tools  # pyright: ignore[reportUnknownVariableType]
