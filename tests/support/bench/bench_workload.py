"""The workload that tests of the bench send."""

from __future__ import annotations

from typing import Any

from server.bench.workload import Workload


def workload(**changes: Any) -> Workload:
    fields: dict[str, Any] = {
        "endpoint": "completions",
        "model": "m",
        "input_len": 7,
        "output_len": 5,
        "vocab_size": 1000,
        "ignore_eos": False,
        "temperature": 0.0,
        "seed": 0,
    }
    return Workload(**(fields | changes))
