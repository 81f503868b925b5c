"""A RequestError about a ChatRequest, told with the fields of the body that the caller sent."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

from server.errors import RequestError

MESSAGE = re.compile(r"messages\[(\d+)\]")


@contextmanager
def callers_names(paths: Sequence[str], fields: Mapping[str, str]) -> Generator[None]:
    """Rewrite the RequestErrors of the block.

    paths   where message i of the ChatRequest came from: paths[i]
    fields  ChatRequest's name of a field -> the caller's, where they differ
    """

    def place(match: re.Match[str]) -> str:
        index = int(match[1])
        return paths[index] if index < len(paths) else match[0]

    def field(match: re.Match[str]) -> str:
        return f"`{fields[match[1]]}`"

    try:
        yield
    except RequestError as error:
        message = MESSAGE.sub(place, error.message)
        if fields:
            named = "|".join(map(re.escape, fields))
            message = re.sub(f"`({named})`", field, message)
        error.message = message
        if error.param is not None:
            error.param = fields.get(error.param, MESSAGE.sub(place, error.param))
        raise
