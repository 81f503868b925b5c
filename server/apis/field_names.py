"""RequestErrors about a ChatRequest, with the names of the fields that the caller sent."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from server.errors import FieldPath, RequestError

Sources = Sequence[Sequence[FieldPath]]
Parts = Mapping[FieldPath, FieldPath]
NONE: Parts = MappingProxyType({})


@contextmanager
def map_error_fields(
    names: Mapping[str, str], sources: Sources = (), parts: Parts = NONE
) -> Generator[None]:
    """Name the fields in RequestErrors of the block as the caller does.

    names    the beginning of a field's path in the ChatRequest -> that of the caller's, with * for
             an index; the longest that fits is replaced
    sources  of each message of the ChatRequest: the caller's field that it was made of, then those
             of its tool calls, which replace their paths after `names`
    parts    messages.*.content.* of each image of the ChatRequest -> the caller's field of it
    """
    try:
        yield
    except RequestError as error:
        error.rename_fields(
            lambda path: (
                parts.get(FieldPath(*path[:4])) or _in_source(_renamed(path, names), sources)
            )
        )
        raise


def _renamed(path: FieldPath, names: Mapping[str, str]) -> FieldPath:
    for length in range(len(path), 0, -1):
        indices = (step for step in path[:length] if isinstance(step, int))
        name = names.get(".".join("*" if isinstance(step, int) else step for step in path[:length]))
        if name is not None:
            steps = (next(indices) if step == "*" else step for step in name.split("."))
            return FieldPath(*steps, *path[length:])
    return path


def _in_source(path: FieldPath, sources: Sources) -> FieldPath:
    if path[:1] != ("messages",) or len(path) < 2 or not sources:
        return path
    message, *calls = sources[int(path[1])]
    if path[2:3] == ("tool_calls",) and len(path) > 3:
        return FieldPath(*calls[int(path[3])], *path[4:])
    return FieldPath(*message, *path[2:])
