"""RequestErrors about a ChatRequest, with the names of the fields that the caller sent."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from server.errors import RequestError

MESSAGE = re.compile(r"^messages\[(\d{1,6})\]")
QUOTED = re.compile(r"`([^`\s]+)`")  # error messages quote field paths so


@contextmanager
def map_error_fields(paths: Sequence[str], fields: Mapping[str, str]) -> Generator[None]:
    """Rewrite the RequestErrors of the block.

    paths   paths[i] is the caller's field that message i of the ChatRequest was made of
    fields  regular expression of a field of ChatRequest, or of the beginning of its path -> the
            caller's name, as re.sub writes it, where they differ
    """
    renamed = [(re.compile(rf"^{name}(?=[.\[]|$)"), theirs) for name, theirs in fields.items()]

    def message_path(match: re.Match[str]) -> str:
        index = int(match[1])
        return paths[index] if index < len(paths) else match[0]

    def rename(path: str) -> str:
        path = MESSAGE.sub(message_path, path)
        for name, theirs in renamed:
            path, found = name.subn(theirs, path)
            if found:
                break
        return path

    try:
        yield
    except RequestError as error:
        error.message = QUOTED.sub(lambda match: f"`{rename(match[1])}`", error.message)
        error.param = error.param and rename(error.param)
        raise
