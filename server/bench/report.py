"""A run as a table for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple

import orjson

from server.bench.metrics import PERCENTILES, Failure, Outcome, Spread, Summary

LABEL = 28
COLUMN = 11
MIN_REPORTED_LAG_S = 0.05


def table(title: str, summary: Summary, outcomes: Sequence[Outcome], lag_s: float) -> str:
    """The report for the terminal."""
    lines = [title, "", *_counts(summary), "", *_latencies(summary)]
    if lag_s > MIN_REPORTED_LAG_S:
        lines += [
            "",
            f"note: this client sent up to {lag_s * 1000:.0f} ms late; the figures include it. "
            "Lower --rate or give the client a faster core.",
        ]
    reported: set[str] = set()
    for outcome in outcomes:
        if isinstance(outcome, Failure) and outcome.kind not in reported:
            reported.add(outcome.kind)
            times = summary.errors[outcome.kind]
            lines += ["", f"{times} x {outcome.kind}, for example: {outcome.message}"]
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
    return [f"{name:<{LABEL}}{value}" for name, value in rows]


def _latencies(summary: Summary) -> list[str]:
    heads = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    lines = ["ms".ljust(LABEL) + "".join(head.rjust(COLUMN) for head in heads)]
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
        lines.append(name.ljust(LABEL) + "".join(value.rjust(COLUMN) for value in figures))
    return lines


def as_json(arguments: dict[str, object], summary: Summary, lag_s: float) -> bytes:
    """The report as JSON: the arguments of the run and its figures."""
    figures = {"arguments": arguments, "client_lag_s": lag_s, **asdict(summary)}
    return orjson.dumps(figures, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
