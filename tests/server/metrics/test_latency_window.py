"""Percentiles of the last minute, kept only while they are asked for."""

from __future__ import annotations

import random

import pytest

from server.metrics.latency_window import (
    KEPT_SECONDS,
    WINDOW_SECONDS,
    LatencyWindow,
    percentiles,
)
from server.metrics.metrics import Metrics


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_percentiles_are_within_two_percent():
    window, numbers = LatencyWindow(), random.Random(1)
    window.keep()
    seconds = sorted(numbers.lognormvariate(-4, 1) for _ in range(1000))
    window.add(seconds)
    found = percentiles(window.counts(), (0.5, 0.9, 0.99))
    for share, value in zip((0.5, 0.9, 0.99), found, strict=True):
        assert value == pytest.approx(seconds[round(share * 1000) - 1], rel=0.021)


def test_there_are_none_before_the_first_latency():
    assert percentiles(LatencyWindow().counts(), (0.5,)) == [None]


def test_nothing_is_kept_unless_asked_for():
    clock = Clock()
    window = LatencyWindow(clock)
    window.add([1.0])
    assert window.counts() == {}
    window.keep()
    clock.now += KEPT_SECONDS - 1
    window.add([1.0])
    clock.now += 2
    window.add([1.0])
    assert sum(window.counts().values()) == 1


def test_a_latency_is_forgotten_after_a_minute():
    clock = Clock()
    window = LatencyWindow(clock)
    window.keep()
    window.add([1.0, 2.0])
    clock.now += WINDOW_SECONDS - 1
    assert sum(window.counts().values()) == 2
    clock.now += 2
    assert window.counts() == {}


def test_the_metrics_pass_on_what_they_count():
    metrics = Metrics()
    metrics.keep_recent()
    metrics.inter_token(0.02)
    metrics.first_token(0.3)
    metrics.keep_recent()
    assert sum(metrics.recent_inter_token.counts().values()) == 1
    assert percentiles(metrics.recent_first_token.counts(), (0.5,)) == [
        pytest.approx(0.3, rel=0.021)
    ]
