"""`quantization_config` of a format: all linear layers but the head; of mxfp4, experts alone."""

from __future__ import annotations

from typing import Any


def _compressed(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FP8 = _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
INT4 = _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
FP8_BLOCK = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
FORMATS: dict[str, dict[str, Any]] = {
    "fp8": FP8,
    "fp8-block": FP8_BLOCK,
    "int4": INT4,
    "mxfp4": MXFP4,
}
