"""Numbers that are counted together at a scrape count as if each had been at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from server.metrics.buffered_histogram import BufferedHistogram
from server.metrics.families import PER_TOKEN_BUCKETS
from server.metrics.metrics import Metrics


@given(st.lists(st.sampled_from([0.0, *PER_TOKEN_BUCKETS, 0.0007, 0.3001, 7.0, 1e4]), max_size=300))
@settings(max_examples=50, deadline=None)
def test_many_numbers_at_once_count_as_one_by_one(seconds: list[float]):
    texts: list[bytes] = []
    for at_once in (True, False):
        registry = CollectorRegistry()
        histogram = Histogram("gaps", "", registry=registry, buckets=PER_TOKEN_BUCKETS)
        if at_once:
            gathered = BufferedHistogram(histogram, PER_TOKEN_BUCKETS)
            for number in seconds:
                gathered.add(number)
            gathered.count()
        else:
            for number in seconds:
                histogram.observe(number)
        lines = generate_latest(registry).splitlines()
        texts.append(b"\n".join(line for line in lines if b"_created" not in line))
    assert texts[0] == texts[1]


def test_gaps_between_tokens_are_there_at_the_next_scrape(metrics: Metrics):
    for _ in range(300):
        metrics.inter_token(0.004)
    line = 'wavefill_inter_token_latency_seconds_bucket{le="0.004",model_name="tiny"} 300.0'
    assert line in metrics.render().decode().splitlines()
