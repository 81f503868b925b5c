"""JSON bodies: a request's is read, an answer's is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from server.errors import UnsupportedMediaType
from server.off_loop import off_loop
from server.schema.body_json import read_json

T = TypeVar("T")


class Json(Response):
    """An answer whose body is the JSON that it is given."""

    media_type = "application/json"


async def read_checked(request: Request, check: Callable[[dict[str, Any]], T]) -> T:
    """check(the body's JSON object), off the event loop if there is much of it.

    Raises RequestError for any other content.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise UnsupportedMediaType(
            f"the content type is `{kind[:60] or 'not given'}`: send `application/json`"
        )
    return await read_any(request, check)


async def read_any(request: Request, check: Callable[[dict[str, Any]], T]) -> T:
    """The same of a body of any content type."""
    # Not request.body(), which keeps the bytes for as long as the request is answered.
    raw = b"".join([piece async for piece in request.stream()])
    return await off_loop(len(raw), lambda: check(read_json(raw)))
