"""The counters and histograms that API processes count into: names, help, labels, buckets."""

from __future__ import annotations

from typing import get_args

from runtime.messages import FinishReason
from server.generation.admission import Reason
from server.metrics.image_causes import ImageCause

FIRST_TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
)  # fmt: skip
PER_TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1, 2.5, 5,
)  # fmt: skip
E2E_BUCKETS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84,
    327.68, 655.36,
)  # fmt: skip
PHASE_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, *E2E_BUCKETS[5:])
TOKEN_COUNT_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))

# Name -> help, and labels with the values that are exported as 0 from the start: rate() misses the
# first sample of a series.
COUNTERS: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "requests": (
        "Completions that finished, by reason.",
        {"finished_reason": get_args(FinishReason)},
    ),
    "admission_rejections": (
        "Requests rejected with 429, by reason.",
        {"reason": get_args(Reason)},
    ),
    "images_refused": (
        "Images of requests that were refused, by cause.",
        {"cause": get_args(ImageCause)},
    ),
    "aborted": (
        "Completions aborted by a disconnect or an error.",
        {"by": ("disconnect", "error")},
    ),
    "answers_unread": ("Connections closed because their client did not read.", {}),
    "batch_lines": (
        "Batch lines that were run, by outcome.",
        {"outcome": ("completed", "failed")},
    ),
    "http_requests": ("HTTP responses, by route and status code.", {"route": (), "code": ()}),
}
# Name -> help and buckets.
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": (
        "Time from arrival to the first token, in seconds.",
        FIRST_TOKEN_BUCKETS,
    ),
    "inter_token_latency_seconds": (
        "Time between two deliveries of tokens, in seconds.",
        PER_TOKEN_BUCKETS,
    ),
    "time_per_output_token_seconds": (
        "Mean time per token after the first of a completion, in seconds.",
        PER_TOKEN_BUCKETS,
    ),
    "e2e_request_latency_seconds": ("Time from arrival to the end, in seconds.", E2E_BUCKETS),
    "request_queue_time_seconds": ("Time in the queue, in seconds.", PHASE_BUCKETS),
    "request_prefill_time_seconds": (
        "Time from scheduling to the first token, in seconds.",
        PHASE_BUCKETS,
    ),
    "request_decode_time_seconds": (
        "Time from the first token to the end, in seconds.",
        PHASE_BUCKETS,
    ),
    "request_inference_time_seconds": (
        "Time from scheduling to the end, in seconds.",
        PHASE_BUCKETS,
    ),
    "request_prompt_tokens": ("Prompt tokens per request.", TOKEN_COUNT_BUCKETS),
    "request_generation_tokens": ("Generated tokens per request.", TOKEN_COUNT_BUCKETS),
    "request_max_generation_tokens": (
        "Generated tokens of the longest completion of an HTTP request.",
        TOKEN_COUNT_BUCKETS,
    ),
}
HTTP_DURATION = "HTTP requests, from arrival to the end of the answer, in seconds."
HTTP_DURATION_BUCKETS = (0.001, 0.0025, 0.005, *E2E_BUCKETS)
