"""What a request generated, for its line in the log and for its trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from runtime.messages import FinishReason, SamplingParams
from server.http.request_context import GENERATION, exchange

Operation = Literal["chat", "text_completion", "embeddings"]  # OpenTelemetry's names


@dataclass(frozen=True)
class Phases:
    """Of one completion, or of all prompts of an embeddings request together.

    Times are monotonic seconds, 0.0 for what has not happened.
    """

    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0


@dataclass(frozen=True)
class RequestSummary:
    operation: Operation
    model: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    params: SamplingParams
    finishes: tuple[FinishReason | None, ...]  # of each completion; None: it still runs
    phases: tuple[Phases, ...]  # of each completion


class Summarized(Protocol):
    def summary(self) -> RequestSummary: ...


def note_generation(generation: Summarized) -> None:
    """Let the HTTP request that this task answers tell of `generation` when it ends."""
    exchange.get({})[GENERATION] = generation
