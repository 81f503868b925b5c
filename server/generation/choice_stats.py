"""Token counts and times of one completion, for its answer, the metrics and the request log."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.messages import RequestOutput
from runtime.snapshot import SequenceEvent
from server.telemetry.summary import Phases


@dataclass(slots=True)
class ChoiceStats:
    """Only its Choice writes it.  Times are monotonic seconds, 0.0 for what has not happened."""

    prompt_tokens: int
    arrived: float
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    ended: float = 0.0
    cached: int = 0  # tokens of the prompt
    generated: int = 0  # tokens
    preemptions: int = 0
    mean_batch: float = 0.0  # 0 until the engine has reported it
    events: list[SequenceEvent] = field(default_factory=list[SequenceEvent])  # at its end

    def add(self, output: RequestOutput) -> None:
        """What the engine reports besides tokens."""
        if output.started:
            self.started = output.started
        self.cached += output.cached
        if output.finish is not None:
            self.preemptions, self.mean_batch = output.preemptions, output.mean_batch
            self.events = output.events

    def phases(self) -> Phases:
        return Phases(self.arrived, self.started, self.first_token, self.ended)

    def timings(self) -> dict[str, object]:
        """The phases in seconds; null for what has not happened or is not known.

        After a stop string, which the engine does not see, the number of preemptions is not known.
        """
        known = self.mean_batch > 0
        return {
            "queue_seconds": _between(self.arrived, self.started),
            "prefill_seconds": _between(self.started, self.first_token),
            "decode_seconds": _between(self.first_token, self.ended),
            "total_seconds": _between(self.arrived, self.ended),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached,
            "completion_tokens": self.generated,
            "preemptions": self.preemptions if known else None,
            "mean_batch_size": round(self.mean_batch, 2) if known else None,
        }

    def events_json(self) -> list[dict[str, object]]:
        """Chunks of the prompt and preemptions, in seconds since the request arrived."""
        found: list[dict[str, object]] = []
        for at, tokens in self.events:
            what: dict[str, object] = {"prefill_tokens": tokens} if tokens else {"preempted": True}
            found.append({"seconds": round(at - self.arrived, 6)} | what)
        return found


def _between(first: float, then: float) -> float | None:
    return round(max(0.0, then - first), 6) if first and then else None
