"""quant_method fp8: e4m3 weights with a scale for each block, or one for all."""

from __future__ import annotations

from model_zoo.json_fields import Fields
from model_zoo.quantization.methods import modelopt
from model_zoo.quantization.name_patterns import NamePatterns
from model_zoo.quantization.quantization_config import (
    EMBEDDINGS,
    QuantizationConfig,
    Rule,
    exclusions,
)
from model_zoo.quantization.stored_format import fp8_format

FORMATS = ("e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn")
LISTS = ("modules_to_not_convert", "ignored_layers")


def read(fields: Fields) -> QuantizationConfig:
    fields.choice("fmt", FORMATS, "e4m3")
    fields.choice("activation_scheme", ("dynamic", "static"), "dynamic")
    block = block_size(fields, "weight_block_size")
    rules = exclusions(fields, LISTS, "components")
    if fields.get("quantized_layers"):  # ModelOpt quantized the experts of an fp8 checkpoint
        rules += modelopt.layer_rules(fields)
    return QuantizationConfig(
        method="fp8",
        path=fields.path,
        rules=(*rules, Rule(NamePatterns.parse(EMBEDDINGS, "components"), None)),
        otherwise=fp8_format("tensor") if block is None else fp8_format("block", block),
    )


def block_size(fields: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns of a block; None: the field is absent or null."""
    value = fields.get(name)
    if value is None:
        return None
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and size > 0 for size in value)
    ):
        raise fields.error(name, value, "two positive integers are expected, such as [128, 128]")
    return value[0], value[1]
