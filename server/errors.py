"""The exceptions that refuse a request, and the error bodies.

    RequestError                    400  the request cannot be honoured as it is
    |-- UnknownParameter            400  unknown_parameter: no such field
    |-- MissingParameter            400  missing_required_parameter
    |-- UnsupportedParameter        400  unsupported_parameter: a known field that is not supported
    |-- ContextTooLong              400  context_length_exceeded
    |-- NotFound                    404  model_not_found, not_found
    |-- UnsupportedMediaType        415  not application/json
    |-- RateLimited                 429  rate_limit_exceeded: no room now; Retry-After
    |-- EngineFailed                500  engine_error: the work on this request failed
    `-- Unavailable                 503  loading, restarting or draining; Retry-After

The body is OpenAI's, always with its four keys:
{"error": {"message": ..., "type": ..., "param": ... or null, "code": ...}}
"""

from __future__ import annotations

import orjson

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"


def error_body(message: str, type: str, param: str | None, code: str | None) -> bytes:
    fields = {"message": message, "type": type, "param": param, "code": code}
    return orjson.dumps({"error": fields})


def internal_error() -> bytes:
    """The body for an internal error, without its details."""
    message = "the server failed on this request; its log has the details"
    return error_body(message, SERVER_ERROR, None, "internal_error")


class RequestError(Exception):
    """A request that gets no answer; the message says what was asked, the limit and the remedy."""

    status = 400
    type = INVALID_REQUEST
    code = "invalid_value"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.code
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        return error_body(self.message, self.type, self.param, self.code)

    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


class UnknownParameter(RequestError):
    code = "unknown_parameter"


class MissingParameter(RequestError):
    code = "missing_required_parameter"


class UnsupportedParameter(RequestError):
    code = "unsupported_parameter"


class ContextTooLong(RequestError):
    code = "context_length_exceeded"


class NotFound(RequestError):
    status = 404


class UnsupportedMediaType(RequestError):
    status = 415
    code = "unsupported_media_type"


class RateLimited(RequestError):
    status = 429
    type = RATE_LIMIT
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, reason: str, retry_after_s: int) -> None:
        """`reason` labels the metric of refusals; see server/generation/admission.py."""
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class EngineFailed(RequestError):
    status = 500
    type = SERVER_ERROR
    code = "engine_error"


class Unavailable(RequestError):
    status = 503
    type = SERVER_ERROR

    def __init__(self, message: str, *, code: str, retry_after_s: int) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
