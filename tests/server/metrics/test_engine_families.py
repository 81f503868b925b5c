"""What is read from the engine at each scrape: its gauges, its counters, its steps."""

from __future__ import annotations

import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from runtime.messages import Progress
from runtime.stats import Stats
from server.engine import engine_state
from server.metrics.metrics import Metrics
from tests.support.server.fake_engine import FakeEngine
from tests.support.server.scrape import ready, values


def test_states_are_counted_of_models_that_have_some(metrics: Metrics):
    assert "wavefill_states" not in values(metrics)
    hybrid = Metrics("tiny")
    stats = Stats(states_used=3, snapshots_used=5)
    has_states = structs.replace(ready(), num_states=9, num_snapshots=68)
    hybrid.watch(ready=lambda: has_states, stats=lambda: stats, state=lambda: "ready")
    found = values(hybrid)
    names = ("states_used", "states", "state_snapshots_used", "state_snapshots")
    assert [found[f"wavefill_{name}"] for name in names] == [3, 9, 5, 68]
    assert found["wavefill_max_concurrency"] == 4.0


def test_pages_are_counted_by_the_window_of_their_layers():
    metrics = Metrics("tiny")
    layers = structs.replace(ready(), group_windows=(0, 32, 32), page_size=16, max_model_len=64)
    stats = Stats(
        pages_used=6, pages_total=20, group_pages_used=(3, 2, 1), group_pages_cached=(4, 0, 5)
    )
    metrics.watch(ready=lambda: layers, stats=lambda: stats, state=lambda: "ready")
    families = text_string_to_metric_families(metrics.render().decode())
    found = {
        (sample.name.removeprefix("wavefill_kv_pages_"), sample.labels.get("window")): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("wavefill_kv_pages_")
    }
    assert found == {
        ("used", "0"): 3, ("used", "32"): 3, ("cached", "0"): 4, ("cached", "32"): 5,
        ("free", None): 5, ("of_longest_request", "0"): 4, ("of_longest_request", "32"): 8,
    }  # fmt: skip


def test_the_engines_numbers_are_read_at_the_scrape(metrics: Metrics):
    found = values(metrics)
    assert found["wavefill_requests_running"] == found["vllm:num_requests_running"] == 3
    assert found["wavefill_requests_waiting"] == 2
    assert found["wavefill_kv_cache_usage_ratio"] == 0.2
    assert found["wavefill_kv_capacity_tokens"] == 4000
    assert found["wavefill_max_concurrency"] == 4
    assert found["wavefill_prefix_cache_hits_total"] == 7
    assert found["wavefill_model_load_seconds"] == 2.5
    assert found["wavefill_engine_up"] == 1


@pytest.mark.parametrize(
    ("ready_now", "silence", "down", "progress", "state"),
    [
        (False, None, None, None, "loading"),
        (False, None, None, Progress("weights", 1, 9), "loading"),
        (True, None, None, None, "ready"),
        (True, "the engine has been silent for 40 s", None, None, "stalled"),
        (False, "ended", "ended", None, "down"),
        (False, "ended", "ended", Progress("weights", 1, 9), "loading"),
    ],
)
def test_a_model_that_loads_and_an_engine_that_is_down_are_different_states(
    metrics: Metrics,
    ready_now: bool,
    silence: str | None,
    down: str | None,
    progress: Progress | None,
    state: str,
):
    engine = FakeEngine(reply=lambda request: [], ready=ready() if ready_now else None)
    engine.down, engine.progress = down, progress
    engine.stalled = lambda: 40.0 if silence else 0.0  # type: ignore[method-assign]
    metrics.watch(ready=ready, stats=Stats, state=lambda: engine_state(engine))
    lines = metrics.render().decode().splitlines()
    for known in ("loading", "ready", "stalled", "down"):
        labels = f'{{engine="0",model_name="tiny",state="{known}"}}'
        assert f"wavefill_engine_state{labels} {float(known == state)}" in lines
    assert f'wavefill_engine_up{{engine="0",model_name="tiny"}} {float(state == "ready")}' in lines


def test_the_engines_steps_are_counted_in_buckets(metrics: Metrics):
    counts = (1, 0, 2, *(0,) * 13)
    stats = Stats(step_tokens_counts=counts, step_tokens_sum=9)
    metrics.watch(ready=ready, stats=lambda: stats, state=lambda: "ready")
    text = metrics.render().decode()
    for name in ("wavefill_iteration_tokens", "vllm:iteration_tokens_total"):
        assert f'{name}_bucket{{engine="0",le="1.0",model_name="tiny"}} 1.0' in text
        assert f'{name}_bucket{{engine="0",le="4.0",model_name="tiny"}} 3.0' in text
        assert f'{name}_count{{engine="0",model_name="tiny"}} 3.0' in text
        assert f'{name}_sum{{engine="0",model_name="tiny"}} 9.0' in text


def test_engines_have_series_of_their_own_under_native_and_other_names(metrics: Metrics):
    stats = Stats(running=5, waiting=1, generated_tokens=40)
    metrics.watch(ready=lambda: None, stats=lambda: stats, state=lambda: "loading", engine=1)
    text = metrics.render().decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("wavefill_requests_running", "vllm:num_requests_running"):
        found = {each.labels["engine"]: each.value for each in families[name].samples}
        assert found == {"0": 3, "1": 5}
    reasons = families["vllm:num_requests_waiting_by_reason"].samples
    capacity = [each for each in reasons if each.labels["reason"] == "capacity"]
    assert {each.labels["engine"]: each.value for each in capacity} == {"0": 2, "1": 1}
    up = families["wavefill_engine_up"].samples
    assert {each.labels["engine"]: each.value for each in up} == {"0": 1, "1": 0}
    # An engine that is not ready has no capacity yet, and what callers see has no engine.
    assert len(families["wavefill_kv_capacity_tokens"].samples) == 1
    assert "engine" not in families["wavefill_requests"].samples[0].labels
    names = [line for line in text.splitlines() if line.startswith("# TYPE ")]
    assert len(names) == len(set(names))


def test_how_steps_use_graphs_is_counted(metrics: Metrics):
    stats = Stats(steps_without_graph=3, steps_in_larger_graph=4, graphs_captured_while_decoding=1)
    metrics.watch(ready=ready, stats=lambda: stats, state=lambda: "ready")
    found = values(metrics)
    assert found["wavefill_steps_without_graph_total"] == 3
    assert found["wavefill_steps_in_larger_graph_total"] == 4
    assert found["wavefill_graphs_captured_while_decoding_total"] == 1


def test_images_are_counted(metrics: Metrics):
    stats = Stats(images_encoded=3, image_cache_hits=4, image_encoder_seconds=0.5)
    metrics.watch(ready=ready, stats=lambda: stats, state=lambda: "ready")
    found = values(metrics)
    assert found["wavefill_images_encoded_total"] == 3
    assert found["wavefill_image_cache_hits_total"] == 4
    assert found["wavefill_image_encoder_seconds_total"] == 0.5


def test_the_error_of_predicted_step_times_is_a_summary(metrics: Metrics):
    stats = Stats(step_predictions=40, step_prediction_error=1.5)
    metrics.watch(ready=ready, stats=lambda: stats, state=lambda: "ready")
    text = metrics.render().decode()
    assert 'wavefill_step_prediction_error_ratio_count{engine="0",model_name="tiny"} 40.0' in text
    assert 'wavefill_step_prediction_error_ratio_sum{engine="0",model_name="tiny"} 1.5' in text
