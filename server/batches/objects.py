"""OpenAI's batch object, and the fields of a batch that only the server sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

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
    owner: str
    output_id: str  # reserved for its output and errors
    error_id: str
    keep_seconds: int  # until those files expire
