"""Engines that are loaded as a server loads them, of a small model in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runtime.config import DeviceOption, EngineConfig
from runtime.engine.loop import Engine
from runtime.startup.loading import load


def loaded_engine(checkpoint: Path, device: DeviceOption, **options: Any) -> Engine:
    """Of 4 rows, 2048 tokens of KV and steps of 512 tokens, unless `options` say otherwise.

    options: fields of EngineConfig
    """
    fields: dict[str, Any] = {
        "max_num_seqs": 4, "kv_tokens": 2048, "max_batched_tokens": 512, "threads": 1,
        "dtype": "float32",
    }  # fmt: skip
    config = EngineConfig(model=str(checkpoint), device=device, **fields | options)
    loaded = load(config, lambda phase, done, total: None)
    return Engine(
        loaded.resolved,
        loaded.ready.vocab_size,
        loaded.executor,
        images=loaded.executor.image_counts,
    )
