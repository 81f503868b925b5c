"""vLLM's names of our numbers, which dashboards, routers and autoscalers read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.metrics_core import Metric

# vLLM's label of an engine's index, which all of its series have.  What API processes count, such
# as latencies, they count for all engines together.
ENGINE = {"engine": "0"}

# vLLM's name -> ours.  The last ones are names of earlier versions that are still read.
VLLM_ALIASES = {
    "vllm:num_requests_running": "wavefill_requests_running",
    "vllm:num_requests_waiting": "wavefill_requests_waiting",
    "vllm:kv_cache_usage_perc": "wavefill_kv_cache_usage_ratio",
    "vllm:prompt_tokens": "wavefill_prompt_tokens",
    "vllm:generation_tokens": "wavefill_generation_tokens",
    "vllm:prefix_cache_queries": "wavefill_prefix_cache_queries",
    "vllm:prefix_cache_hits": "wavefill_prefix_cache_hits",
    "vllm:num_preemptions": "wavefill_preemptions",
    "vllm:iteration_tokens_total": "wavefill_iteration_tokens",
    "vllm:time_to_first_token_seconds": "wavefill_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "wavefill_inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": "wavefill_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds": "wavefill_e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds": "wavefill_request_queue_time_seconds",
    "vllm:request_prefill_time_seconds": "wavefill_request_prefill_time_seconds",
    "vllm:request_decode_time_seconds": "wavefill_request_decode_time_seconds",
    "vllm:request_prompt_tokens": "wavefill_request_prompt_tokens",
    "vllm:request_generation_tokens": "wavefill_request_generation_tokens",
    "vllm:request_inference_time_seconds": "wavefill_request_inference_time_seconds",
    "vllm:request_max_num_generation_tokens": "wavefill_request_max_generation_tokens",
    "vllm:request_success": "wavefill_requests",
    "vllm:prompt_tokens_cached": "wavefill_prompt_tokens_cached",
    "vllm:gpu_cache_usage_perc": "wavefill_kv_cache_usage_ratio",
    "vllm:gpu_prefix_cache_queries": "wavefill_prefix_cache_queries",
    "vllm:gpu_prefix_cache_hits": "wavefill_prefix_cache_hits",
    "vllm:time_per_output_token_seconds": "wavefill_inter_token_latency_seconds",
}
# Labels that vLLM names otherwise: of one family.
VLLM_LABELS = {
    "vllm:cache_config_info": (
        "wavefill_cache_config_info",
        {"page_size": "block_size", "num_pages": "num_gpu_blocks"},
    ),
}


def vllm_families(families: Mapping[str, Metric]) -> Iterator[Metric]:
    """The aliases of those of our families that are there, by our names."""
    for alias, native in VLLM_ALIASES.items():
        yield _renamed(families[native], alias, {})
    for alias, (native, labels) in VLLM_LABELS.items():
        if native in families:
            yield _renamed(families[native], alias, labels)
    yield _waiting_by_reason(families["wavefill_requests_waiting"])


def _waiting_by_reason(waiting: Metric) -> Metric:
    """All wait for capacity: none is deferred, which in vLLM is for a transfer of KV or LoRA."""
    name = "vllm:num_requests_waiting_by_reason"
    family = Metric(name, "Alias.", "gauge")
    for sample in waiting.samples:
        for reason, value in (("capacity", sample.value), ("deferred", 0.0)):
            family.add_sample(name, ENGINE | sample.labels | {"reason": reason}, value)
    return family


def _renamed(source: Metric, name: str, labels: Mapping[str, str]) -> Metric:
    family = Metric(name, "Alias.", source.type)
    family.samples = [
        sample._replace(
            name=name + sample.name.removeprefix(source.name),
            labels=ENGINE
            | {labels.get(label, label): value for label, value in sample.labels.items()},
        )
        for sample in source.samples
        if not sample.name.endswith("_created")
    ]
    return family
