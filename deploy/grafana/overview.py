"""The dashboard `overview`: whether all is well, for every server at once."""

from __future__ import annotations

from expressions import API, ENDS, ERRORS, GENERATED, HTTP, ITL, STATE, TTFT
from panels import GOOD_HIGH, GOOD_LOW, Panel, gauge, graph, quantiles, rate, tile, within

DESCRIPTION = "Whether all is well, for every server at once."


def overview() -> list[Panel]:
    return [
        tile(
            "Engines that answer",
            "Share of the chosen servers' engines that are ready and not silent. Those of servers "
            "that Prometheus cannot reach are missing: the alert WavefillTargetDown names them.",
            "percentunit",
            gauge("wavefill_engine_up", how="avg"),
            GOOD_HIGH["all"],
        ),
        tile(
            "Requests",
            "HTTP requests to routes of the API, without probes and scrapes.",
            "reqps",
            rate(HTTP, where=API),
        ),
        tile(
            "Errors",
            "Share of the API's answers with a status of 500 or above. Probes do not count.",
            "percentunit",
            ERRORS,
            GOOD_LOW["errors"],
        ),
        tile(
            "First tokens in time",
            "Share of completions whose first token came within the chosen objective.",
            "percentunit",
            within(TTFT, "slo_ttft"),
            GOOD_HIGH["attained"],
        ),
        tile(
            "Waiting",
            "Sequences in the queue. If it does not empty, add a replica.",
            "short",
            gauge("wavefill_requests_waiting"),
            GOOD_LOW["waiting"],
        ),
        tile(
            "Generated tokens",
            "Tokens that all answers together get in a second.",
            "short",
            rate(GENERATED),
        ),
        graph(
            "Requests by status",
            "HTTP answers of the API in a second. 429: the queue was full; 499: the client left "
            "before the answer began; 503: loading or draining.",
            "reqps",
            [("{{code}}", rate(HTTP, "code", API))],
            stacked=True,
        ),
        graph(
            "Share of errors",
            "The API's answers with a status of 500 or above. The alert WavefillErrors fires above "
            "2 %.",
            "percentunit",
            [("errors", ERRORS)],
            GOOD_LOW["errors"],
        ),
        graph(
            "Time to first token",
            "From arrival to the first token, the time in the queue included.",
            "s",
            quantiles(TTFT),
            GOOD_LOW["ttft"],
        ),
        graph(
            "Time between tokens",
            "Between two deliveries of tokens of one answer (ITL).",
            "s",
            quantiles(ITL),
            GOOD_LOW["itl"],
        ),
        graph(
            "Running and waiting",
            "Sequences in the batch, and in the queue.",
            "short",
            [
                ("running", gauge("wavefill_requests_running")),
                ("waiting", gauge("wavefill_requests_waiting")),
            ],
        ),
        graph(
            "Ends of completions",
            "Completions that ended in a second, by reason. abort: the client left; error: the "
            "engine failed, or a grammar was refused.",
            "ops",
            [("{{finished_reason}}", rate(ENDS, "finished_reason"))],
            stacked=True,
        ),
        STATE,
        graph(
            "Generated tokens by server",
            "Tokens of answers in a second. Servers behind one balancer should be alike.",
            "short",
            [("{{instance}}", rate(GENERATED, "instance"))],
            stacked=True,
        ),
    ]
