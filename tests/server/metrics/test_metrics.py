"""The metrics' names, their values, and the aliases that other tools read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from psutil import Process

from runtime.messages import Progress, Ready, Stats
from server.engine import engine_state
from server.generation.admission import Reason
from server.metrics.buffered_histogram import BufferedHistogram
from server.metrics.families import PER_TOKEN_BUCKETS
from server.metrics.metrics import Metrics
from tests.support.server.fake_engine import FakeEngine

# What vLLM's dashboards, the inference gateway and common autoscalers read.
READ_BY_OTHERS = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:cache_config_info",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:iteration_tokens_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_inference_time_seconds",
    "vllm:request_max_num_generation_tokens",
    "vllm:num_requests_waiting_by_reason",
    # Names of earlier versions.
    "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits",
    "vllm:time_per_output_token_seconds",
}


def ready() -> Ready:
    return Ready(
        epoch=1,
        model_type="qwen3",
        device="cpu",
        dtype="float32",
        attention="mha",
        vocab_size=100,
        max_model_len=1000,
        page_size=16,
        num_pages=250,
        max_num_seqs=8,
        max_batched_tokens=64,
        weight_bytes=1,
        kv_bytes=1,
        load_seconds=2.5,
    )


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics("tiny")
    stats = Stats(running=3, waiting=2, pages_used=50, pages_total=250, cached_tokens=7)
    metrics.watch(ready=ready, stats=lambda: stats, state=lambda: "ready")
    return metrics


def values(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


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


def test_native_names_follow_the_rules_of_prometheus(metrics: Metrics):
    metrics.rejected("queue_full")
    metrics.aborted("disconnect")
    for family in text_string_to_metric_families(metrics.render().decode()):
        if family.name.startswith("vllm:"):
            assert {sample.labels["engine"] for sample in family.samples} == {"0"}
            continue
        assert re.fullmatch(r"(wavefill|process)_[a-z0-9_]+", family.name)
        assert family.documentation
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            ends_in_total = sample.name.endswith("_total")
            assert ends_in_total == (family.type == "counter") or "_created" in sample.name


def test_what_has_not_happened_yet_is_counted_as_0(metrics: Metrics):
    lines = metrics.render().decode().splitlines()
    for name, label, known in (
        ("requests", "finished_reason", {"stop", "length", "abort", "error"}),
        ("admission_rejections", "reason", set(get_args(Reason))),
        ("aborted", "by", {"disconnect", "error"}),
        ("batch_lines", "outcome", {"completed", "failed"}),
    ):
        found = {line for line in lines if line.startswith(f"wavefill_{name}_total{{")}
        labels = {re.search(f'{label}="(.*?)"', line)[1] for line in found}  # type: ignore[index]
        assert labels == known and all(line.endswith(" 0.0") for line in found)


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
def test_a_model_that_loads_is_told_from_an_engine_that_is_down(
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


def test_a_request_is_split_into_its_phases(metrics: Metrics):
    metrics.request_finished("stop", 10, 5, arrived=1.0, started=1.5, first_token=2.0, ended=4.0)
    found = values(metrics)
    assert found["wavefill_request_queue_time_seconds_sum"] == 0.5
    assert found["wavefill_request_prefill_time_seconds_sum"] == 0.5
    assert found["wavefill_time_to_first_token_seconds_sum"] == 1.0
    assert found["wavefill_request_decode_time_seconds_sum"] == 2.0
    assert found["wavefill_time_per_output_token_seconds_sum"] == 0.5
    assert found["wavefill_request_inference_time_seconds_sum"] == 2.5
    assert found["wavefill_e2e_request_latency_seconds_sum"] == 3.0


def test_an_aborted_request_makes_no_answer_look_shorter(metrics: Metrics):
    metrics.request_finished("abort", 10, 5, arrived=1.0, started=1.5, first_token=2.0, ended=4.0)
    text = metrics.render().decode().splitlines()
    assert 'wavefill_requests_total{finished_reason="abort",model_name="tiny"} 1.0' in text
    labels = '{engine="0",finished_reason="abort",model_name="tiny"}'
    assert f"vllm:request_success_total{labels} 1.0" in text
    found = values(metrics)
    assert found["wavefill_time_to_first_token_seconds_count"] == 1
    for name in ("e2e_request_latency", "request_decode_time", "request_inference_time"):
        assert found[f"wavefill_{name}_seconds_count"] == 0


def test_requests_wait_for_capacity(metrics: Metrics):
    text = metrics.render().decode()
    name, labels = "vllm:num_requests_waiting_by_reason", 'engine="0",model_name="tiny"'
    assert f'{name}{{{labels},reason="capacity"}} 2.0' in text
    assert f'{name}{{{labels},reason="deferred"}} 0.0' in text


def test_versions_and_processes_are_there(metrics: Metrics):
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    (build,) = families["wavefill_build_info"].samples
    assert build.value == 1 and build.labels["version"] == version("wavefill")
    (memory,) = families["process_resident_memory_bytes"].samples
    assert memory.labels["process"] == "api"
    own = Process()
    assert memory.value == pytest.approx(own.memory_info().rss, rel=0.2)
    (start,) = families["process_start_time_seconds"].samples
    assert start.value == pytest.approx(own.create_time(), abs=2)
    (cpu,) = families["process_cpu_seconds"].samples
    assert cpu.name == "process_cpu_seconds_total"
    assert cpu.value == pytest.approx(sum(own.cpu_times()[:2]), abs=1)


def test_each_route_has_a_histogram_of_durations(metrics: Metrics):
    metrics.http_request("/v1/completions", 200, 0.3)
    metrics.http_request("/health", 200, 0.0005)
    text = metrics.render().decode()
    name, rest = "wavefill_http_request_duration_seconds", 'model_name="tiny",route='
    assert f'{name}_sum{{{rest}"/v1/completions"}} 0.3' in text
    assert f'{name}_bucket{{le="0.001",{rest}"/health"}} 1.0' in text


def test_a_request_that_never_started_has_no_phases(metrics: Metrics):
    metrics.request_finished("error", 10, 0, arrived=1.0, started=0.0, first_token=0.0, ended=4.0)
    found = values(metrics)
    assert found["wavefill_e2e_request_latency_seconds_count"] == 1
    assert found["wavefill_time_to_first_token_seconds_count"] == 0
    assert found["wavefill_request_queue_time_seconds_count"] == 0


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


def test_refused_images_are_counted_by_cause_from_0(metrics: Metrics):
    metrics.image_refused("count", 20)
    metrics.image_refused("damaged")
    text = metrics.render().decode()
    for cause, count in (("count", 20), ("damaged", 1), ("fetch", 0), ("model", 0)):
        name = f'wavefill_images_refused_total{{cause="{cause}",model_name="tiny"}}'
        assert f"{name} {count:.1f}" in text


def test_token_times_below_and_above_a_millisecond_have_buckets_of_their_own(metrics: Metrics):
    metrics.inter_token(0.0007)
    text = metrics.render().decode()
    assert 'inter_token_latency_seconds_bucket{le="0.0005",model_name="tiny"} 0.0' in text
    assert 'inter_token_latency_seconds_bucket{le="0.001",model_name="tiny"} 1.0' in text


def test_every_name_that_other_tools_read_is_there_with_the_native_value(metrics: Metrics):
    metrics.request_finished("stop", 10, 5, arrived=1.0, started=1.5, first_token=2.0, ended=4.0)
    names = {f.name for f in text_string_to_metric_families(metrics.render().decode())}
    assert names >= READ_BY_OTHERS
    found = values(metrics)
    for phase in ("queue", "prefill", "decode"):
        name = f"request_{phase}_time_seconds_sum"
        assert found[f"vllm:{name}"] == found[f"wavefill_{name}"]


def test_the_aliases_can_be_left_out():
    assert "vllm:" not in Metrics("tiny", "none").render().decode()


def test_what_several_processes_counted_is_summed(tmp_path: Path):
    count = """
import sys
from server.metrics.buffered_histogram import BufferedHistogram
from server.metrics.families import PER_TOKEN_BUCKETS
from server.metrics.metrics import Metrics
metrics = Metrics("tiny", shared=sys.argv[1])
times = {"arrived": 100.0, "started": 100.1, "first_token": 100.2, "ended": 101.0}
metrics.request_finished("stop", 10, 5, **times)
metrics.http_request("/health", 200, 0.1)
print(metrics.render().decode())
"""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", count, str(tmp_path)]
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    for line in (
        'wavefill_requests_total{finished_reason="stop",model_name="tiny"} 3.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 3.0',
        'wavefill_http_requests_total{code="200",model_name="tiny",route="/health"} 3.0',
        'wavefill_request_generation_tokens_sum{model_name="tiny"} 15.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="tiny"} 3.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 3.0',
    ):
        assert line in done.stdout.splitlines(), done.stdout
    assert done.stdout.count("# TYPE wavefill_requests_total") == 1


def engine_totals(metrics: Metrics) -> list[float]:
    """The engine's counters, and its histograms of one step."""
    found = values(metrics)
    names = ("generation_tokens_total", "engine_steps_total", "engine_step_seconds_sum")
    return [found[f"wavefill_{name}"] for name in (*names, "iteration_tokens_count")]


def stats_of(steps: int) -> Stats:
    return Stats(
        steps=steps,
        generated_tokens=10 * steps,
        step_seconds_sum=0.5 * steps,
        step_tokens_counts=(steps, *(0,) * 15),
    )


class Seen:
    """What an API process knows of the engine."""

    def __init__(self, shared: Path | None) -> None:
        self.shared = shared
        self.engine: Ready | None = ready()
        self.stats = Stats()
        self.metrics = Metrics("tiny", compat="none", shared=str(shared or ""))
        self.metrics.watch(
            ready=lambda: self.engine, stats=lambda: self.stats, state=lambda: "ready"
        )


@pytest.fixture
def two(tmp_path: Path) -> tuple[Seen, Seen]:
    """API processes that count in one folder."""
    return Seen(tmp_path), Seen(tmp_path)


def test_the_engines_counters_are_never_less_than_another_process_has_shown(
    two: tuple[Seen, Seen],
):
    one, other = two
    one.stats, other.stats = stats_of(4), stats_of(3)
    assert engine_totals(one.metrics) == engine_totals(other.metrics) == [40, 4, 2.0, 4]
    other.stats = stats_of(5)
    assert engine_totals(other.metrics) == engine_totals(one.metrics) == [50, 5, 2.5, 5]
    started_again = Seen(one.shared)
    started_again.engine = None
    assert engine_totals(started_again.metrics) == [50, 5, 2.5, 5]


@pytest.mark.parametrize("shared", [True, False])
def test_the_engines_counters_go_on_when_it_is_started_again(two: tuple[Seen, Seen], shared: bool):
    one, other = two if shared else (Seen(None), None)
    one.stats = stats_of(4)
    assert engine_totals(one.metrics) == [40, 4, 2.0, 4]
    one.engine, one.stats = None, Stats()
    assert engine_totals(one.metrics) == [40, 4, 2.0, 4]
    one.engine, one.stats = structs.replace(ready(), epoch=2), stats_of(1)
    assert engine_totals(one.metrics) == [50, 5, 2.5, 5]
    if other is not None:
        other.stats = stats_of(3)  # it has not heard of the new engine
        assert engine_totals(other.metrics) == [50, 5, 2.5, 5]


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


def test_the_error_of_predicted_step_times_is_a_summary(metrics: Metrics):
    stats = Stats(step_predictions=40, step_prediction_error=1.5)
    metrics.watch(ready=ready, stats=lambda: stats, state=lambda: "ready")
    text = metrics.render().decode()
    assert 'wavefill_step_prediction_error_ratio_count{engine="0",model_name="tiny"} 40.0' in text
    assert 'wavefill_step_prediction_error_ratio_sum{engine="0",model_name="tiny"} 1.5' in text
