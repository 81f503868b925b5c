"""`quantization_config` of a format: all linear layers but the head; of mxfp4, experts alone."""

from __future__ import annotations

from typing import Any


def _compressed(
    name: str, *, activations: dict[str, Any] | None = None, **weights: Any
) -> dict[str, Any]:
    """activations: their type, of W8A8 with a scale for each token"""
    group: dict[str, Any] = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    if activations is not None:
        of_tokens = {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": True}
        group["input_activations"] = of_tokens | activations
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FP8 = _compressed(
    "float-quantized", activations={"type": "float"}, num_bits=8, type="float", strategy="channel"
)
INT8 = _compressed(
    "int-quantized", activations={"type": "int"}, num_bits=8, type="int", strategy="channel"
)
AWQ = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["lm_head"],
}
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
    "int8": INT8,
    "int4": INT4,
    "awq": AWQ,
    "mxfp4": MXFP4,
}
