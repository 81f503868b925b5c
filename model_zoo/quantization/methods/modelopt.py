"""quant_method modelopt: config.json's spelling, and that of hf_quant_config.json."""

from __future__ import annotations

from model_zoo.json_fields import Fields
from model_zoo.quantization.quantization_config import QuantizationConfig, Rule, exclusions, rule
from model_zoo.quantization.stored_format import StoredFormat, fp8_format

FORMATS = {
    "FP8": fp8_format("tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": fp8_format("channel"),
    "FP8_PB_WO": fp8_format("block", (128, 128), activation_bits=16),
    "FP8_BLOCK_SCALES": fp8_format("block", (128, 128)),
    "NVFP4": StoredFormat(name="nvfp4", bits=4, strategy="group", group=16),
    "W4A16_NVFP4": StoredFormat(name="nvfp4", bits=4, strategy="group", group=16),
}
MIXED = "MIXED_PRECISION"
REMEDY = f"supported are {', '.join(FORMATS)} and {MIXED}: use another repository of this model"


def read(fields: Fields) -> QuantizationConfig | None:
    """None: only the KV cache is quantized."""
    if "quantization" in fields.values:
        fields = fields.nested("quantization")
    if fields.get("quant_algo") is None:
        return None
    rules = exclusions(fields, ("exclude_modules", "ignore"), "components")
    otherwise = None
    if fields.get("quant_algo") == MIXED:
        if not fields.get("quantized_layers"):
            raise fields.error(
                "quantized_layers", None, f"{MIXED} needs the algorithm of each layer"
            )
        rules += layer_rules(fields)
    else:
        otherwise = _stored(fields)
    return QuantizationConfig(
        method="modelopt", path=fields.path, rules=tuple(rules), otherwise=otherwise
    )


def layer_rules(fields: Fields) -> list[Rule]:
    """The rules of `quantized_layers`: a module, or one that holds others, and its algorithm."""
    layers = fields.nested("quantized_layers")
    names: dict[StoredFormat, list[str]] = {}
    for name in layers.values:
        names.setdefault(_stored(layers.nested(name)), []).append(name)
    return [
        rule(fields, "quantized_layers", entries, "components", stored)
        for stored, entries in names.items()
    ]


def _stored(fields: Fields) -> StoredFormat:
    algorithm = fields.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in FORMATS:
        raise fields.error("quant_algo", algorithm, REMEDY)
    stored = FORMATS[algorithm]
    if stored.group is not None and fields.integer("group_size", stored.group) != stored.group:
        raise fields.error(
            "group_size", fields.get("group_size"), f"{algorithm} has groups of {stored.group}"
        )
    return stored
