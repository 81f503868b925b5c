"""What the order of eviction of snapshots is for, in simulated traffic."""

from __future__ import annotations

import pytest

from benchmarks.schedule.bench_snapshots import LeastRecentlyUsed, Served, computed, traffic


@pytest.mark.parametrize(
    ("kind", "at_most"),
    [("agents among short questions", 0.6), ("agents", 0.8), ("chats", 1.01)],
)
def test_less_is_computed_than_with_the_least_recently_used_first(kind: str, at_most: float):
    served, recent = (computed(order(), 54, traffic(kind)) for order in (Served, LeastRecentlyUsed))
    assert served < at_most * recent
