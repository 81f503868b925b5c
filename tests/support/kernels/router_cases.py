"""Routers of tests."""

from __future__ import annotations

from model_zoo.moe_config import RouterConfig

GROUPED = RouterConfig(
    num_experts=64,
    top_k=6,
    scoring="sigmoid",
    renormalize=True,
    scale=2.5,
    groups=8,
    kept_groups=3,
    correction_bias=True,
)
