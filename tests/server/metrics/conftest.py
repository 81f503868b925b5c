"""Metrics of one engine, as one API process has them."""

from __future__ import annotations

import pytest

from runtime.stats import Stats
from server.metrics.metrics import Metrics
from tests.support.server.scrape import ready


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics("tiny")
    stats = Stats(running=3, waiting=2, pages_used=50, pages_total=250, cached_tokens=7)
    metrics.watch(ready=ready, stats=lambda: stats, state=lambda: "ready")
    return metrics
