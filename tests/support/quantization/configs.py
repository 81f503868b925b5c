"""Fields of quantization_config, for tests to change."""

from __future__ import annotations

from typing import Any

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 128}


def compressed(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        **fields,
    }


def group(*targets: str, **weights: Any) -> dict[str, Any]:
    return {"targets": list(targets), "weights": {"type": "int", "num_bits": 4, **weights}}
