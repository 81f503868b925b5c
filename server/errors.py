"""The exceptions that refuse a request, and the error bodies.

    RequestError                    400  the request cannot be honoured as it is
    |-- UnknownParameter            400  unknown_parameter: no such field
    |-- MissingParameter            400  missing_required_parameter
    |-- UnsupportedParameter        400  unsupported_parameter: a known field that is not supported
    |-- ContextTooLong              400  context_length_exceeded
    |-- NotFound                    404  model_not_found, not_found
    |-- Forbidden                   403  what this API key may not see
    |-- UnsupportedMediaType        415  not application/json
    |-- RateLimited                 429  rate_limit_exceeded: no room now; Retry-After
    |-- EngineFailed                500  engine_error: the work on this request failed
    `-- Unavailable                 503  loading, restarting or draining; Retry-After

The body is OpenAI's, always with its four keys:
{"error": {"message": ..., "type": ..., "param": ... or null, "code": ...}}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from string import Formatter
from typing import LiteralString, cast

import orjson

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"
INTERNAL_ERROR = "internal_error"  # a code


def error_body(message: str, type: str, param: str | None, code: str | None) -> bytes:
    fields = {"message": message, "type": type, "param": param, "code": code}
    return orjson.dumps({"error": fields})


def internal_error() -> bytes:
    """The body for an internal error, without its details."""
    message = "the server failed on this request; its log has the details"
    return error_body(message, SERVER_ERROR, None, INTERNAL_ERROR)


class FieldPath(tuple[str | int, ...]):
    """The path of a field in a body: FieldPath("messages", 0, "content") is messages[0].content."""

    __slots__ = ()

    def __new__(cls, *steps: str | int) -> FieldPath:
        return super().__new__(cls, steps)

    def __truediv__(self, step: str | int) -> FieldPath:
        return FieldPath(*self, step)

    def __str__(self) -> str:
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in self]
        return "".join(steps).removeprefix(".")

    def quoted(self) -> str:
        """For a message: its ends, if it is long."""
        path = str(self)
        return f"`{path}`" if len(path) <= 160 else f"`{path[:60]}...{path[-100:]}`"


class RequestError(Exception):
    """A request that gets no answer; the message says what was asked, the limit and the remedy."""

    status = 400
    type = INVALID_REQUEST
    code = "invalid_value"

    def __init__(
        self,
        template: LiteralString,
        values: object = (),
        *,
        param: FieldPath | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """The message is `template` with a field of the request at each {name} and {name.name},
        and at each {} the next value, which is a field if it is a FieldPath.

        values  one, or a tuple of them
        param   None: the first field of the message
        """
        self._parts = list(_parts(template, values))
        self._param = param or next((p for p in self._parts if isinstance(p, FieldPath)), None)
        self.code = code or self.code
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message

    @property
    def message(self) -> str:
        """The fields of the request stand in backticks."""
        return "".join(part if isinstance(part, str) else part.quoted() for part in self._parts)

    @property
    def param(self) -> str | None:
        return str(self._param) if self._param else None

    def rename_fields(self, renamed: Callable[[FieldPath], FieldPath]) -> None:
        """Name every field as `renamed` does."""
        self._parts = [part if isinstance(part, str) else renamed(part) for part in self._parts]
        self._param = self._param and renamed(self._param)

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.param, self.code)

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def _parts(template: str, values: object) -> Iterator[str | FieldPath]:
    several = isinstance(values, tuple) and not isinstance(values, FieldPath)
    remaining = iter(cast("tuple[object, ...]", values if several else (values,)))
    for text, name, spec, conversion in Formatter().parse(template):
        yield text
        if name:
            yield FieldPath(*name.split("."))
        elif name is not None:
            value = next(remaining)
            if not isinstance(value, FieldPath):
                value = format(repr(value) if conversion == "r" else value, spec or "")
            yield value
    assert not [*remaining], "more values than places for them"


class Forbidden(RequestError):
    status = 403
    type = "permission_error"
    code = "forbidden"


class UnknownParameter(RequestError):
    code = "unknown_parameter"


class MissingParameter(RequestError):
    code = "missing_required_parameter"


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"


class ContextTooLong(RequestError):
    """A prompt, or a prompt and its answer, that the context does not hold.

    The message begins with OpenAI's words: clients that shorten a conversation look for them.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        prompt_len: int,
        limit: int,
        template: LiteralString,
        values: tuple[object, ...],
        *,
        param: FieldPath,
    ) -> None:
        super().__init__(
            "This model's maximum context length is {} tokens. However, " + template,
            (limit, *values),
            param=param,
        )
        self.prompt_len = prompt_len
        self.limit = limit


class NotFound(RequestError):
    status = 404


class UnsupportedMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class RateLimited(RequestError):
    status = 429
    type = RATE_LIMIT
    code = "rate_limit_exceeded"
    reason = ""  # labels the metric of refusals; see server/generation/admission.py


class EngineFailed(RequestError):
    status = 500
    type = SERVER_ERROR
    code = "engine_error"


class Unavailable(RequestError):
    status = 503
    type = SERVER_ERROR
