"""A RequestError about a ChatRequest, told with the fields of the body that the caller sent."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from server.errors import RequestError

MESSAGE = re.compile(r"^messages\[(\d{1,6})\]")
QUOTED = re.compile(r"`([^`\s]+)`")  # messages have every field's path in such marks


@contextmanager
def map_error_fields(paths: Sequence[str], fields: Mapping[str, str]) -> Generator[None]:
    """Rewrite the RequestErrors of the block.

    paths   where message i of the ChatRequest came from: paths[i]
    fields  ChatRequest's name of a field or the beginning of its path, as a regular expression ->
            the caller's, as re.sub writes it, where they differ
    """
    renamed = [(re.compile(rf"^{name}(?=[.\[]|$)"), theirs) for name, theirs in fields.items()]

    def place(match: re.Match[str]) -> str:
        index = int(match[1])
        return paths[index] if index < len(paths) else match[0]

    def rename(path: str) -> str:
        path = MESSAGE.sub(place, path)
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
