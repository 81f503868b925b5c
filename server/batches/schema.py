"""Bodies, queries and objects of /v1/files and /v1/batches."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Struct
from pydantic import Field

from server.apis.openai.chat_schema import Metadata
from server.errors import FieldPath, RequestError
from server.http.validation import Body

Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
AnyPurpose = Literal[
    "assistants", "batch", "batch_output", "fine-tune", "vision", "user_data", "evals"
]
Id = Annotated[str, Field(min_length=1, max_length=64)]


class ExpiresAfter(Body):
    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=30 * 86400)


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


Status = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
    "completed",
    "failed",
    "expired",
    "cancelled",
]


class BatchError(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(Struct, frozen=True):
    data: list[BatchError]
    object: str = "list"


class RequestCounts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class CachedTokens(Struct, frozen=True):
    cached_tokens: int = 0


class ReasoningTokens(Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(Struct, frozen=True):
    input_tokens: int = 0
    input_tokens_details: CachedTokens = CachedTokens()
    output_tokens: int = 0
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int = 0


class BatchObject(Struct, frozen=True, kw_only=True):
    """OpenAI's batch object."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str = "24h"
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None


@dataclass(frozen=True)
class StoredBatch:
    """A batch and the fields that clients do not see."""

    batch: BatchObject
    owner: bytes
    output_id: str  # reserved for its output and errors
    error_id: str
    keep_seconds: int  # until those files expire


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
            raise RequestError("{} is given twice: send it once", FieldPath(nested[1]))
    return fields
