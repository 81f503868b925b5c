"""The API keys that `wavefill serve` is given."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from server.cli.config_file import NO_FILE, ConfigFile, find_text
from server.cli.main import UsageError


def read_keys(
    args: argparse.Namespace, environment: Mapping[str, str], settings: ConfigFile = NO_FILE
) -> tuple[str, ...]:
    """The keys of all sources, none of them empty.  Raises UsageError."""
    keys = list(args.api_key or ())
    if not all(key.strip() for key in keys):  # a variable of the shell that is not set
        raise UsageError("--api-key: it is empty: give a key, or leave the option out")
    variable = environment.get("WAVEFILL_API_KEY", "").split(",")
    if len(variable) > 1 and not any(key.strip() for key in variable):
        raise UsageError("WAVEFILL_API_KEY: it has commas alone: give a key, or unset it")
    keys += variable
    listed = settings.get("api-key", tuple[str, ...]) or ()
    keys += listed.split(",") if isinstance(listed, str) else listed
    _, file = find_text("api-key-file", args, environment, settings)
    keys += _keys_of_file(file) if file else []
    return tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))


def _keys_of_file(file: str) -> list[str]:
    remedy = "give a text file that this user may read, with a line KEY or NAME KEY for each"
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise UsageError(f"--api-key-file {file}: {error.strerror}: {remedy}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--api-key-file {file}: not UTF-8 text: {remedy}") from None
    keys = list[str]()
    for number, words in enumerate(map(str.split, lines), 1):
        if not words or words[0].startswith("#"):
            continue
        # The last word would be the key.
        if any(word.startswith("#") for word in words):
            raise UsageError(
                f"--api-key-file {file}, line {number}: no comment stands after a key, and neither "
                "name nor key begins with #: give the comment a line of its own"
            )
        keys.append(" ".join(words))
    if not keys:
        raise UsageError(f"--api-key-file {file}: it holds no key: {remedy}")
    return keys
