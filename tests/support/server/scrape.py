"""What tests of metrics share: an engine that is ready, and the samples of a scrape."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from runtime.messages import Ready
from server.metrics.metrics import Metrics


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


def values(metrics: Metrics) -> dict[str, float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}
