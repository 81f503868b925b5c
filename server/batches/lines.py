"""A batch's input: JSON lines, each of them one request.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from server.batches.schema import BatchError
from server.errors import FieldPath, MissingParameter, RequestError, UnknownParameter
from server.http.json_body import read_json
from server.http.validation import items_of, kind_of

MAX_LINES = 50_000
MAX_BLANK = 1000
MAX_ERRORS = 100  # the rest of the file is not read
MAX_CUSTOM_ID = 512  # characters
KEYS = ("custom_id", "method", "url", "body")
BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    number: int  # from 1, as editors count
    custom_id: str
    body: dict[str, Any]

    def num_sequences(self) -> int:
        """How many sequences the line would run; the route checks the body."""
        prompt = items_of(self.body.get("prompt") or self.body.get("input"))
        several = 1 if all(type(item) is int for item in prompt) else len(prompt)
        copies = [self.body.get("n"), self.body.get("best_of")]
        return several * max([1, *(n for n in copies if type(n) is int)])


def raw_lines(path: Path, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of the lines that are not blank; a longer one is cut after `max_bytes`."""
    num_blank = 0
    with path.open("rb") as file:
        for number, raw in enumerate(iter(lambda: file.readline(max_bytes + 2), b""), 1):
            rest = raw
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(max_bytes + 2)
            if number == 1:
                raw = raw.removeprefix(BOM)
            if raw.strip():
                yield number, raw
            else:
                num_blank += 1
                if num_blank > MAX_BLANK:
                    return


def lines(path: Path, max_bytes: int) -> Iterator[Line]:
    """The lines of an input that `check_input` has accepted."""
    for number, raw in raw_lines(path, max_bytes):
        fields = read_json(raw)
        yield Line(number, fields["custom_id"], fields["body"])


def check_input(
    path: Path, endpoint: str, max_line_bytes: int
) -> tuple[int, str | None, list[BatchError]]:
    """The number of lines, the first one's model, and the errors.

    The bodies are not checked: a route that refuses one fails that line only.
    """
    errors: list[BatchError] = []
    seen: set[str] = set()
    num_lines, model = 0, None
    for number, raw in raw_lines(path, max_line_bytes):
        num_lines += 1
        if num_lines > MAX_LINES:
            text = f"the file has more than {MAX_LINES} requests: split it"
            errors.append(BatchError(code="too_many_requests", message=text, line=number))
            break
        try:
            fields = _fields(raw, endpoint, max_line_bytes, seen)
        except RequestError as error:
            errors.append(
                BatchError(code=error.code, message=error.message, line=number, param=error.param)
            )
            if len(errors) >= MAX_ERRORS:
                break
            continue
        first = fields["body"].get("model")
        if num_lines == 1 and isinstance(first, str):
            model = first[:256]
    if not num_lines:
        text = "the file has no requests: send at least one line"
        errors.append(BatchError(code="empty_file", message=text))
    return num_lines, model, errors


def _fields(raw: bytes, endpoint: str, max_bytes: int, seen: set[str]) -> dict[str, Any]:
    if len(raw.rstrip(b"\r\n")) > max_bytes:
        raise RequestError(
            "the line is longer than {} bytes: send less", max_bytes, code="line_too_long"
        )
    try:
        fields = read_json(raw, "the line")
    except RequestError as error:
        error.code = "invalid_json_line"
        raise
    for key in KEYS:
        if key not in fields:
            raise MissingParameter("{} is required: add it", FieldPath(key))
    for key in fields:
        if key not in KEYS:
            raise UnknownParameter(
                "{} is not a part of a line ({}): remove it", (FieldPath(key[:64]), ", ".join(KEYS))
            )
    _check_values(fields, endpoint, seen)
    return fields


def _check_values(fields: dict[str, Any], endpoint: str, seen: set[str]) -> None:
    custom_id, method, url = fields["custom_id"], fields["method"], fields["url"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID:
        raise RequestError(
            "{custom_id} must be a string of 1 to {} characters",
            MAX_CUSTOM_ID,
            code="invalid_custom_id",
        )
    if custom_id in seen:
        raise RequestError(
            "the custom_id {!r} was used before: each line needs one of its own",
            custom_id[:64],
            param=FieldPath("custom_id"),
            code="duplicate_custom_id",
        )
    seen.add(custom_id)
    if method != "POST":
        raise RequestError("{method} must be 'POST'", code="invalid_method")
    if url != endpoint:
        found = repr(url[:64]) if isinstance(url, str) else f"a {kind_of(url)}"
        raise RequestError(
            "{url} is {}, the batch is for {!r}: use the same in every line",
            (found, endpoint),
            code="invalid_url",
        )
    if kind_of(fields["body"]) != "object":
        raise RequestError(
            "{body} must be an object, not {}", kind_of(fields["body"]), code="invalid_type"
        )
