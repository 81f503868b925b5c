"""The TOML file of --config: the options of `wavefill serve`, by their names without the dashes."""

from __future__ import annotations

import argparse
import difflib
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_origin

from msgspec import Struct

from server.cli.main import UsageError
from server.cli.vllm_flags import replacement

VARIABLE = "WAVEFILL_CONFIG"
DEFAULT = "default"  # the source of what is set nowhere
# Options that are no fields of a configuration: their types.
OTHER_TYPES: dict[str, Any] = {
    "model": str,
    "revision": str,
    "api-key": tuple[str, ...],
    "api-key-file": str,
}


class ConfigFile(Struct, frozen=True):
    """What a file sets, by option; types are checked when a value is read."""

    path: str = ""
    values: dict[str, Any] = {}

    def source(self, option: str) -> str:
        return f"{self.path}: {option}"

    def has(self, option: str) -> bool:
        return option in self.values

    def get(self, option: str, hint: Any) -> Any:
        """The value, None if it is not set.  Raises UsageError for one of another type."""
        if option not in self.values:
            return None
        return checked(self.source(option), self.values[option], hint)

    def text(self, option: str) -> str:
        """One of OTHER_TYPES that is a text; "" if it is not set."""
        return self.get(option, str) or ""


NO_FILE = ConfigFile()


def find_text(
    option: str, args: argparse.Namespace, environment: Mapping[str, str], file: ConfigFile
) -> tuple[str, str]:
    """Where one of OTHER_TYPES that is a text comes from, and what it is; (DEFAULT, "") else."""
    name = option.replace("-", "_")
    if value := getattr(args, name):
        return ("MODEL" if option == "model" else f"--{option}"), value
    variable = f"WAVEFILL_{name.upper()}"
    if value := environment.get(variable):
        return variable, value
    value = file.text(option)
    return (file.source(option), value) if value else (DEFAULT, "")


def add_config_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with options of `wavefill serve` by name, as in: port = 8001; the command "
        "line and the environment beat it",
    )


def load(
    args: argparse.Namespace,
    environment: Mapping[str, str],
    options: Iterable[str],
    renamed: Mapping[str, str],
) -> ConfigFile:
    """The file of --config or WAVEFILL_CONFIG.  Raises UsageError.

    options   that it may set; renamed: old names of some of them
    """
    name = getattr(args, "config", None) or environment.get(VARIABLE)
    if not name:
        return NO_FILE
    path = os.path.expanduser(name)
    try:
        values = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(
            f"--config {name}: {error.strerror}: give a TOML file that this user may read"
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {name}: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(
            f'--config {name}: not TOML: {error}: a line is like port = 8001 or host = "0.0.0.0"'
        ) from None
    known = {*options, *OTHER_TYPES}
    for key, value in values.items():
        if key in renamed:
            raise UsageError(f"{name}: {key}: its name is {renamed[key]} now")
        if key not in known:
            table = "write options outside of tables, without [...] above them"
            remedy = table if isinstance(value, dict) else nearest(key, known)
            raise UsageError(f"{name}: {key}: not an option of wavefill serve: {remedy}")
        if key in OTHER_TYPES:
            checked(f"{name}: {key}", value, OTHER_TYPES[key])
    return ConfigFile(name, values)


def nearest(key: str, known: set[str]) -> str:
    """What to write instead of `key`."""
    spelled = key.lower().replace("_", "-").lstrip("-")
    if spelled in known:
        return f"write {spelled}"
    if spelled.removeprefix("no-") in known:
        return f"write {spelled.removeprefix('no-')} = false"
    if "--" in (of_others := replacement(spelled)):
        return of_others.replace("--", "")
    near = difflib.get_close_matches(spelled, sorted(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "see `wavefill serve --help`"


def checked(source: str, value: Any, hint: Any) -> Any:
    """A value of a file, as an option of type `hint` takes it.  Raises UsageError."""
    if get_origin(hint) is tuple:
        if isinstance(value, str):
            return value
        entries = cast("list[Any]", value if isinstance(value, list) else [None])
        if all(isinstance(entry, str) for entry in entries):
            return tuple(str(entry).strip() for entry in entries)
        raise _wrong(source, value, 'a list of texts is needed, as ["a", "b"]')
    if hint is bool:
        if isinstance(value, bool):
            return value
        raise _wrong(source, value, "true or false is needed, without quotes")
    if hint is int:
        if isinstance(value, str) or (is_number(value) and isinstance(value, int) and value >= 0):
            return value
        raise _wrong(source, value, 'a whole number from 0 up is needed, as 4096 or "32k"')
    if hint is float:
        if is_number(value) and 0 <= value < math.inf:
            return float(value)
        raise _wrong(source, value, "a number from 0 up is needed, without quotes")
    assert hint is str or get_origin(hint) is Literal, hint
    if isinstance(value, str):
        return value
    raise _wrong(source, value, 'a text in quotes is needed, as "auto"')


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(source: str, value: Any, needed: str) -> UsageError:
    if isinstance(value, dict):
        return UsageError(f"{source}: it is a table: {needed}")
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    return UsageError(f"{source} = {shown}: {needed}")
