"""Valid requests to corrupt, and what the response to a corrupt one must look like."""

from __future__ import annotations

from enum import Enum
from typing import Any

import httpx2 as httpx

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"content-type": "application/json"}
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "Hello"}]},
    TEXT: {"model": "fake", "prompt": "Hello"},
    "/tokenize": {"prompt": "Hello"},
    "/detokenize": {"tokens": [1, 2]},
}


class Field(Enum):
    """Stands for a field that is not in a body; its text is the same in every process."""

    REMOVED = "removed"


REMOVED = Field.REMOVED

MISSING = "missing_required_parameter"
TYPE = "invalid_type"
VALUE = "invalid_value"
UNKNOWN = "unknown_parameter"
UNSUPPORTED = "unsupported_parameter"
TOO_LONG = "context_length_exceeded"
M0 = "messages[0]"


def messages(*contents: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for content in contents]}


def spoilt(route: str, change: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (BASE[route] | change).items() if value is not REMOVED}


def row_name(row: tuple[Any, ...]) -> str:
    """Of a row that begins with a route, a change and a code."""
    route, change, code, *_ = row
    return f"{route.rsplit('/', 1)[-1]}-{repr(change)[:48]}-{code}"


def error(answer: httpx.Response) -> dict[str, Any]:
    """The error object of an answer in OpenAI's form."""
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


def check(answer: httpx.Response, status: int, code: str, param: str | None, words: str) -> None:
    """OpenAI's body, with a message that says what to do."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    found = error(answer)
    assert (found["code"], found["param"]) == (code, param), found
    assert found["type"] == "invalid_request_error"
    assert words in found["message"], found
    assert len(found["message"]) < 600
