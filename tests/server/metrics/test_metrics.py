"""The metrics' names, those of requests, and the aliases that other tools read."""

from __future__ import annotations

import re
from importlib.metadata import version
from typing import get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families
from psutil import Process

from server.generation.admission import Reason
from server.metrics.metrics import Metrics
from tests.support.server.scrape import values

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
