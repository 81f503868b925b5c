"""From the time stamps of requests to the figures of a report.  Pure: no clock, no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class RequestResult:
    """A request that was answered.  Times are seconds of one clock.

    start:      when it was sent; in an open loop, when it was due, so that a late client does not
                make the server look fast
    deliveries: when each chunk with text arrived, in order; at least one
    The counts of tokens are the server's own (`usage`): one chunk may hold several tokens.
    """

    start: float
    deliveries: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.deliveries[0] - self.start

    @property
    def e2e(self) -> float:
        """Time to the last token."""
        return self.deliveries[-1] - self.start

    @property
    def tpot(self) -> float | None:
        """Mean time of a token after the first; None where there is no other."""
        return (self.e2e - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def itl(self) -> list[float]:
        """Gaps between deliveries."""
        return [b - a for a, b in pairwise(self.deliveries)]


@dataclass(frozen=True)
class Failure:
    """A request that was not answered: `kind` is counted, `message` is shown once a kind."""

    kind: str
    message: str


Outcome = RequestResult | Failure


@dataclass(frozen=True)
class Spread:
    """How a figure is distributed, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Objectives:
    """Limits in milliseconds; a good request keeps all that are set."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met(self, answer: RequestResult) -> bool:
        limits = ((self.ttft, answer.ttft), (self.tpot, answer.tpot), (self.e2e, answer.e2e))
        return all(
            limit is None or seconds is None or seconds * 1000 <= limit for limit, seconds in limits
        )

    @property
    def any(self) -> bool:
        return self != Objectives()


@dataclass(frozen=True)
class Summary:
    """One run.  Spreads are None where nothing was measured."""

    completed: int
    failed: int
    errors: dict[str, int]
    duration_s: float  # from the first request sent to the last token
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    good_requests_per_s: float | None  # None without objectives
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of ascending values, linear between neighbours, as numpy.percentile."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def spread(seconds: Iterable[float]) -> Spread | None:
    ordered = sorted(value * 1000 for value in seconds)
    if not ordered:
        return None
    mean = sum(ordered) / len(ordered)
    return Spread(mean, *(percentile(ordered, percent) for percent in PERCENTILES))


def summarize(outcomes: Sequence[Outcome], objectives: Objectives) -> Summary:
    """The figures of a run; a failed request adds to nothing but the errors."""
    answers = [outcome for outcome in outcomes if isinstance(outcome, RequestResult)]
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    duration = 0.0
    if answers:
        began = min(answer.start for answer in answers)
        duration = max(answer.deliveries[-1] for answer in answers) - began
    prompt = sum(answer.prompt_tokens for answer in answers)
    output = sum(answer.output_tokens for answer in answers)
    good = sum(objectives.met(answer) for answer in answers)

    def per_second(count: int) -> float:
        return count / duration if duration else 0.0

    return Summary(
        completed=len(answers),
        failed=len(failures),
        errors=dict(Counter(failure.kind for failure in failures).most_common()),
        duration_s=duration,
        prompt_tokens=prompt,
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        output_tokens=output,
        requests_per_s=per_second(len(answers)),
        output_tokens_per_s=per_second(output),
        total_tokens_per_s=per_second(prompt + output),
        good_requests_per_s=per_second(good) if objectives.any else None,
        ttft_ms=spread(answer.ttft for answer in answers),
        tpot_ms=spread(tpot for answer in answers if (tpot := answer.tpot) is not None),
        itl_ms=spread(gap for answer in answers for gap in answer.itl),
        e2e_ms=spread(answer.e2e for answer in answers),
    )
