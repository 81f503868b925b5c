"""Bodies and queries of /v1/files and /v1/batches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from server.apis.openai.chat_schema import Metadata
from server.errors import RequestError
from server.http.validation import Body

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
AnyPurpose = Literal[
    "assistants", "batch", "batch_output", "fine-tune", "vision", "user_data", "evals"
]
Id = Annotated[str, Field(min_length=1, max_length=64)]
HOUR, MONTH = 3600, 30 * 86400  # seconds


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=HOUR, le=MONTH)


class FileForm(Body):
    """The fields of an upload beside the file itself."""

    purpose: Purpose
    expires_after: ExpiresAfter | None = None


class FileQuery(Body):
    after: Id | None = None
    limit: int = Field(10_000, ge=1, le=10_000)
    order: Literal["asc", "desc"] = "desc"
    purpose: AnyPurpose | None = None


class BatchRequest(Body):
    input_file_id: Id
    endpoint: Annotated[str, Field(min_length=1, max_length=64)]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchQuery(Body):
    after: Id | None = None
    limit: int = Field(20, ge=1, le=100)


NUMBER = re.compile(r"-?[0-9]{1,9}")
NESTED = re.compile(r"(\w{1,64})\[(\w{1,64})\]")


def form_fields(pairs: Mapping[str, str]) -> dict[str, Any]:
    """Fields of a form as JSON would have them: `a[b]` nested, numbers as such.

    Raises RequestError if a field is both nested and not.
    """
    fields: dict[str, Any] = {}
    for name, text in pairs.items():
        nested = NESTED.fullmatch(name)
        last = name if nested is None else nested[2]
        value = int(text) if last == "seconds" and NUMBER.fullmatch(text) else text
        if nested is None:
            fields[name] = value
        elif isinstance(inner := fields.setdefault(nested[1], {}), dict):
            inner[nested[2]] = value
        else:
            raise RequestError(f"`{nested[1]}` is given twice: send it once", param=nested[1])
    return fields
