"""The dashboard `latency`: how long clients wait, for what, and how many within the objective."""

from __future__ import annotations

from expressions import E2E, ENDS, ITL, TPOT, TTFT
from panels import (
    GOOD_HIGH,
    GOOD_LOW,
    Panel,
    graph,
    heatmap,
    quantile,
    quantiles,
    rate,
    ratio,
    row,
    tile,
    within,
)

DESCRIPTION = "How long clients wait, for what, and how many within the objective."


def latency() -> list[Panel]:
    phases = (
        ("Time in the queue", "request_queue_time", "From arrival to the first step."),
        ("Prefill", "request_prefill_time", "From the first step to the first token."),
        ("Decode", "request_decode_time", "From the first token to the end."),
    )
    return [
        tile(
            "First token, p99",
            "99 of 100 completions had their first token sooner.",
            "s",
            quantile(0.99, TTFT),
            GOOD_LOW["ttft"],
        ),
        tile(
            "Between tokens, p99",
            "99 of 100 deliveries came sooner after the one before.",
            "s",
            quantile(0.99, ITL),
            GOOD_LOW["itl"],
        ),
        tile(
            "Whole answer, p99",
            "99 of 100 answers were complete sooner. It depends on their lengths above all.",
            "s",
            quantile(0.99, E2E),
            GOOD_LOW["e2e"],
        ),
        tile(
            "First tokens in time",
            "Share of completions whose first token came within the chosen objective.",
            "percentunit",
            within(TTFT, "slo_ttft"),
            GOOD_HIGH["attained"],
        ),
        tile(
            "Tokens in time",
            "Share of deliveries that came within the chosen objective after the one before.",
            "percentunit",
            within(ITL, "slo_itl"),
            GOOD_HIGH["attained"],
        ),
        tile(
            "Aborted",
            "Share of completions whose clients left before the end: the impatient are missing in "
            "the times of whole answers.",
            "percentunit",
            ratio(rate(ENDS, where='finished_reason="abort"'), rate(ENDS)),
            GOOD_LOW["errors"],
        ),
        row("First token"),
        graph("Time to first token", "From arrival, the queue included.", "s", quantiles(TTFT)),
        heatmap(
            "First tokens by time",
            "How many came after how long: two bands are two kinds of requests, or a cold cache.",
            "s",
            TTFT,
        ),
        graph(
            "First tokens in time",
            "Share within the objective that is chosen above.",
            "percentunit",
            [("within the objective", within(TTFT, "slo_ttft"))],
            GOOD_HIGH["attained"],
        ),
        graph(
            "Time to first token by server",
            "p90 of each server. One that differs is overloaded, or has a cold cache.",
            "s",
            [
                (
                    "{{instance}}",
                    f"histogram_quantile(0.9, {rate(f'{TTFT}_bucket', 'le, instance')})",
                )
            ],
        ),
        row("Tokens after the first"),
        graph("Time between tokens", "Between two deliveries of one answer.", "s", quantiles(ITL)),
        heatmap("Tokens by time", "How many came how long after the one before.", "s", ITL),
        graph(
            "Tokens in time",
            "Share within the objective that is chosen above.",
            "percentunit",
            [("within the objective", within(ITL, "slo_itl"))],
            GOOD_HIGH["attained"],
        ),
        graph(
            "Time per token of a completion",
            "Mean of each completion after its first token (TPOT).",
            "s",
            quantiles(TPOT),
        ),
        row("Whole answers, and where their time goes"),
        graph(
            "Whole answers", "From arrival to the end, of those that ended.", "s", quantiles(E2E)
        ),
        heatmap("Answers by time", "How many took how long.", "s", E2E),
        *(
            graph(title, text, "s", quantiles(f"wavefill_{name}_seconds"))
            for title, name, text in phases
        ),
        graph(
            "HTTP requests by route, p90",
            "From arrival to the end of the answer, of every route, probes included.",
            "s",
            [
                (
                    "{{route}}",
                    "histogram_quantile(0.9, "
                    + rate("wavefill_http_request_duration_seconds_bucket", "le, route")
                    + ")",
                )
            ],
        ),
    ]
