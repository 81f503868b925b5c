"""JSON bodies: a request's is read, an answer's is written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from server.errors import RequestError, UnsupportedMediaType
from server.generation.off_loop import off_loop
from server.http.validation import fields_of, items_of, kind_of

MAX_DEPTH = 64
MAX_BRACKETS = 131_072  # outside of strings
MAX_VALUES = 1_200_000  # separated by commas: an embeddings request may have 1,048,576 token ids
MAX_KEYS = 262_144  # of all objects: each that differs takes as long as six values
CHUNK_BYTES = 1 << 18
STRING = re.compile(rb'"[^"]*(?:"|\Z)')  # where nothing is escaped; the last one may go on


def read_json(raw: bytes, what: str = "the body") -> dict[str, Any]:
    """Parse a request body.  Raises RequestError (code invalid_json) that says where it broke.

    Nothing else runs in this process while a body is parsed: so it has few enough values for that
    to take less than a tenth of a second, unless they are long strings.
    """
    brackets = raw.count(b"[") + raw.count(b"{")
    many = brackets > MAX_BRACKETS or raw.count(b",") > MAX_VALUES
    if many or raw.count(b":") > MAX_KEYS:
        _check_structure(raw, what)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _json_error(raw, what, error) from None
    if brackets > MAX_DEPTH:
        _check_depth(value, what)
    if kind_of(value) != "object":
        raise RequestError(
            "{} is a JSON {}: send a JSON object", (what, kind_of(value)), code="invalid_type"
        )
    return fields_of(value)


def _check_structure(raw: bytes, what: str) -> None:
    brackets, commas, keys = structure(raw)
    for count, limit, unit in (
        (brackets, MAX_BRACKETS, "objects and arrays"),
        (commas, MAX_VALUES, "values"),
        (keys, MAX_KEYS, "keys"),
    ):
        if count > limit:
            raise RequestError(
                "{} has {} {}, at most {} are taken: send less in one request",
                (what, count, unit, limit),
                code="invalid_json",
            )


def structure(raw: bytes, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, int, int]:
    """Opening brackets, commas and colons outside of strings.

    Other threads run between two chunks.
    """
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = commas = colons = 0
    inside = False  # of a string
    for start in range(0, len(plain), chunk_bytes):
        text = plain[start : start + chunk_bytes]
        ends_inside = inside ^ bool(text.count(b'"') % 2)
        if inside:
            text = text.partition(b'"')[2]
        inside = ends_inside
        text = STRING.sub(b"", text)
        brackets += text.count(b"[") + text.count(b"{")
        commas += text.count(b",")
        colons += text.count(b":")
    return brackets, commas, colons


def _json_error(raw: bytes, what: str, error: orjson.JSONDecodeError) -> RequestError:
    if not raw:
        return RequestError("{} is empty: send a JSON object", what, code="invalid_json")
    try:
        raw.decode()
    except UnicodeDecodeError as broken:
        return RequestError(
            "{} is not valid UTF-8 at byte {}: encode it as UTF-8",
            (what, broken.start),
            code="invalid_json",
        )
    if "depth" in error.msg or "recursion" in error.msg:
        return _too_deep(what)
    return RequestError(
        "{} is not valid JSON: {} (line {} column {}); numbers must be finite and strings "
        "free of lone surrogates",
        (what, error.msg, error.lineno, error.colno),
        code="invalid_json",
    )


def _too_deep(what: str) -> RequestError:
    return RequestError(
        "{} is nested deeper than {} levels: flatten it", (what, MAX_DEPTH), code="invalid_json"
    )


def _check_depth(value: object, what: str) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for box in level
            for item in items_of(box) or fields_of(box).values()
            if isinstance(item, list | dict)
        ]
        if not level:
            return
    raise _too_deep(what)


T = TypeVar("T")


class JsonBody(Response):
    """An answer whose body is JSON that has been encoded."""

    media_type = "application/json"


async def read_checked(request: Request, check: Callable[[dict[str, Any]], T]) -> T:
    """check(the body's JSON object), off the event loop if there is much of it.

    Raises RequestError for any other content.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(
            "the content type is `{}`: send `application/json`", kind[:60] or "not given"
        )
    return await read_any(request, check)


async def read_any(request: Request, check: Callable[[dict[str, Any]], T]) -> T:
    """check(the body's JSON object), whatever its content type.  Raises RequestError."""
    # Not request.body(), which keeps the bytes for as long as the request is answered.
    raw = b"".join([chunk async for chunk in request.stream()])
    return await off_loop(len(raw), lambda: check(read_json(raw)))
