"""`wavefill config`: the settings that `wavefill serve` would have, and where each comes from."""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_type_hints

import msgspec

from runtime.config import EngineConfig
from server.cli.commands import serve
from server.cli.config_file import DEFAULT, ConfigFile, find_text
from server.cli.flags import (
    ENGINE_FLAGS,
    SERVER_FLAGS,
    find_setting,
    flag_of,
    read_config_file,
    unknown_variables,
)
from server.cli.terminal import BOLD, DIM, columns, styled
from server.config import ServerConfig

# Name -> help of the settings that are no fields with a flag.
OTHERS = {
    "model": "a directory, a Hub id, or the built-in model",
    "revision": "branch, tag or commit of a Hub model",
    "api-key": "keys that clients have to send; those of all sources together",
    "api-key-file": "file with one key a line; # begins a comment",
}


@dataclass(frozen=True)
class Setting:
    name: str  # as in a file
    value: object  # as in a file; of keys how many
    source: str
    help: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    serve.add_arguments(parser)
    parser.usage = "wavefill config [MODEL] [OPTIONS]"
    parser.description = (
        "Print the settings that `wavefill serve` with the same arguments would have, as a TOML "
        "file for --config; those with their default value are commented out.  The command line "
        "beats the environment, that the file, and that the default.  Nothing is started."
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--explain",
        action="store_true",
        help="instead: each setting, its value, where that comes from, and what it is for",
    )
    shown.add_argument("--json", action="store_true", help="the same as JSON")


def run(args: argparse.Namespace) -> int:
    file = read_config_file(args, os.environ)
    config = serve.requested_config(args, os.environ, file)
    for variable, remedy in unknown_variables(os.environ).items():
        print(f"warning: {variable} sets nothing: {remedy}", file=sys.stderr)
    found = settings(config, args, os.environ, file)
    if args.json:
        print(json.dumps([vars(setting) for setting in found], indent=2))
    elif args.explain:
        print("\n".join(explained(setting) for setting in found))
    else:
        print("\n".join(as_toml(setting) for setting in found))
    return 0


def settings(
    config: ServerConfig,
    args: argparse.Namespace,
    environment: Mapping[str, str],
    file: ConfigFile,
) -> list[Setting]:
    """All settings in the order of --help."""

    def text_setting(name: str) -> Setting:
        source, value = find_text(name, args, environment, file)
        return Setting(name, value, source, OTHERS[name])

    model = Setting("model", config.engine.model, text_setting("model").source, OTHERS["model"])
    key_source = _key_sources(args, environment, file)
    keys = Setting("api-key", len(config.api_keys), key_source, OTHERS["api-key"])
    found = [model, text_setting("revision"), keys, text_setting("api-key-file")]
    for owner, struct, table in (
        (config, ServerConfig, SERVER_FLAGS),
        (config.engine, EngineConfig, ENGINE_FLAGS),
    ):
        hints = get_type_hints(struct)
        for name, text in table.items():
            source, _ = find_setting(name, args, environment, file, hints[name])
            value = getattr(owner, name)
            found.append(Setting(flag_of(name)[2:], msgspec.to_builtins(value), source, text))
    return found


def _key_sources(args: argparse.Namespace, environment: Mapping[str, str], file: ConfigFile) -> str:
    found = ["--api-key"] if args.api_key else []
    found += ["WAVEFILL_API_KEY"] if environment.get("WAVEFILL_API_KEY") else []
    found += [file.source("api-key")] if file.has("api-key") else []
    found += ["api-key-file"] if find_text("api-key-file", args, environment, file)[1] else []
    return ", ".join(found) or DEFAULT


def toml_value(value: object) -> str:
    """A value in TOML: a JSON text is one of TOML, too, and so are numbers and lists of texts."""
    return json.dumps(value, ensure_ascii=False)


def as_toml(setting: Setting) -> str:
    line = f"{setting.name} = {toml_value(setting.value)}"
    if setting.name == "api-key":
        count = setting.value
        return f"# api-key: {count} from {setting.source}" if count else "# api-key = []"
    return f"# {line}" if setting.source == DEFAULT else line


def explained(setting: Setting) -> str:
    """The value and its source in a line, then the help."""
    value = toml_value(setting.value)
    if setting.name == "api-key":
        value = f"({setting.value} keys)" if setting.value != 1 else "(1 key)"
    width = columns() if sys.stdout.isatty() else 80
    style = DIM if setting.source == DEFAULT else BOLD
    head = f"{setting.name} = {value}"
    gap = " " * max(2, 48 - len(head))
    lines = textwrap.wrap(setting.help, width - 4, break_on_hyphens=False)
    text = textwrap.indent("\n".join(lines), "    ")
    return f"{head}{gap}{styled(setting.source, style, sys.stdout)}\n{text}"
