"""The picture of docs/scheduling.md: what a step's prompt tokens cost, and which are taken.

    python -m benchmarks.schedule.plot_objective docs/img/chunk_objective.svg

matplotlib is in the extra `bench`.
"""

from __future__ import annotations

import sys

import numpy as np

from benchmarks.attention.plots import svg_figures
from benchmarks.schedule.device_model import H200
from runtime.scheduler.chunked_prefill import FIRST_TOKEN_WEIGHT, HEADROOM
from runtime.scheduler.step_time import StepLoad

ROWS, CONTEXT, PROMPT, ANSWER = 100, 1152, 1024, 256
QUEUES = {2: "#0b6e4f", 16: "#1f4e9c", 64: "#d1495b"}  # prompts that wait


def main(path: str) -> None:
    svg_figures()
    from matplotlib import pyplot

    decode = H200.step_ms(StepLoad(ROWS, 0, ROWS * CONTEXT, 0.0)) / 1000
    token = H200.token_us / 1e6
    tokens = np.linspace(64, 4096, 400)
    figure, axes = pyplot.subplots(figsize=(7, 3.6))
    for prompts, colour in QUEUES.items():
        waiting = (prompts + 1) / 2 * prompts * PROMPT / FIRST_TOKEN_WEIGHT
        step = decode + tokens * token
        cost = ROWS * step + waiting * step / tokens
        axes.plot(tokens, cost, color=colour, label=f"{prompts} prompts wait")
        best = (waiting * decode / (token * ROWS)) ** 0.5
        lowest = (decode + best * token) * (ROWS + waiting / best)
        axes.plot([best], [lowest], "o", color=colour)
    flow = HEADROOM * PROMPT / ANSWER * ROWS
    axes.axvline(flow, color="#777777", linestyle="--", label="flow")
    axes.set_ylim(0, 14)
    axes.set_xlabel("prompt tokens of a step")
    axes.set_ylabel("waiting of all requests, s")
    axes.set_title(f"{ROWS} decode rows of {PROMPT}/{ANSWER}, Qwen3-8B on an H200 (simulated)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main(sys.argv[1])
