"""The figures of a run from the time stamps of its requests, as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise

import orjson

PERCENTILES = (50, 90, 99)
LABEL_WIDTH = 28  # characters
COLUMN_WIDTH = 11
MIN_REPORTED_LAG_S = 0.05


@dataclass(frozen=True)
class RequestResult:
    """A request that was answered.  Times are seconds of one clock.

    start:      when it was sent; in an open loop, when it was due, so that a late client does not
                make the server seem fast
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
    """A request that was not answered: `kind` is counted, `message` is reported once a kind."""

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
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


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


def table(title: str, summary: Summary, outcomes: Sequence[Outcome], lag_s: float) -> str:
    """The report for the terminal."""
    lines = [title, "", *_counts(summary), "", *_latencies(summary)]
    if lag_s > MIN_REPORTED_LAG_S:
        lines += [
            "",
            f"note: this client sent up to {lag_s * 1000:.0f} ms late; the figures include it. "
            "Lower --rate or give the client a faster core.",
        ]
    examples: dict[str, str] = {}
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            examples.setdefault(outcome.kind, outcome.message)
    for kind, message in examples.items():
        lines += ["", f"{summary.errors[kind]} x {kind}, for example: {message}"]
    return "\n".join(lines)


def _counts(summary: Summary) -> list[str]:
    cached = 100 * summary.cached_tokens / max(1, summary.prompt_tokens)
    rows = [
        ("requests", f"{summary.completed:,} answered, {summary.failed:,} failed"),
        ("duration", f"{summary.duration_s:.2f} s"),
        ("prompt tokens", f"{summary.prompt_tokens:,} ({cached:.0f} % found in a cache)"),
        ("output tokens", f"{summary.output_tokens:,}"),
        ("requests / s", f"{summary.requests_per_s:.2f}"),
        ("output tokens / s", f"{summary.output_tokens_per_s:,.1f}"),
        ("total tokens / s", f"{summary.total_tokens_per_s:,.1f}"),
    ]
    if summary.good_requests_per_s is not None:
        rows.append(("good requests / s", f"{summary.good_requests_per_s:.2f}"))
    return [f"{name:<{LABEL_WIDTH}}{value}" for name, value in rows]


def _latencies(summary: Summary) -> list[str]:
    heads = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    lines = ["ms".ljust(LABEL_WIDTH) + "".join(head.rjust(COLUMN_WIDTH) for head in heads)]
    rows: list[tuple[str, Spread | None]] = [
        ("time to first token", summary.ttft_ms),
        ("time per output token", summary.tpot_ms),
        ("between deliveries (ITL)", summary.itl_ms),
        ("whole request (E2E)", summary.e2e_ms),
    ]
    for name, spread in rows:
        figures = ["-"] * len(heads)
        if spread is not None:
            figures = [f"{value:,.2f}" for value in astuple(spread)]
        lines.append(
            name.ljust(LABEL_WIDTH) + "".join(value.rjust(COLUMN_WIDTH) for value in figures)
        )
    return lines


def as_json(arguments: dict[str, object], summary: Summary, lag_s: float) -> bytes:
    """The report as JSON: the arguments of the run and its figures."""
    figures = {"arguments": arguments, "client_lag_s": lag_s, **asdict(summary)}
    return orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
