"""quant_method auto-round: the packing of GPTQ or AWQ, with settings for single modules."""

from __future__ import annotations

from model_zoo.json_fields import Fields
from model_zoo.quantization.methods.awq import awq_format
from model_zoo.quantization.methods.gptq import V1, V2, gptq_format
from model_zoo.quantization.name_patterns import NamePatterns
from model_zoo.quantization.quantization_config import (
    EMBEDDINGS,
    QuantizationConfig,
    Rule,
    exclusions,
    rule,
)
from model_zoo.quantization.stored_format import StoredFormat

PACKINGS = {
    "auto_round:auto_gptq": V1,
    "auto_round:gptq": V1,
    "auto_round:gptqmodel": V2,
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
}
DEFAULT = "auto_round:auto_gptq"
UNQUANTIZED_BITS = 16


def read(fields: Fields) -> QuantizationConfig:
    fields.choice("packing_format", tuple(PACKINGS), DEFAULT)
    fields.choice("data_type", ("int",), "int")
    extra = fields.nested("extra_config")
    rules = exclusions(fields, ("modules_to_not_convert",), "components")
    for name in extra.values:
        own = extra.nested(name)
        stored = None
        if own.integer("bits", fields.integer("bits")) < UNQUANTIZED_BITS:
            stored = _stored(fields.overridden(own.values))
        # A whole name, or an expression that may begin anywhere.
        is_regex = any(character in name for character in r"*+?^$()[]{}|\\")
        entries = [f"re:.*(?:{name})" if is_regex else name]
        rules.append(rule(fields, "extra_config", entries, "name", stored))
    rules.append(Rule(NamePatterns.parse(EMBEDDINGS, "components"), None))
    stored = _stored(fields)
    blocks = _blocks(fields)
    if blocks:
        rules.append(rule(fields, "block_name_to_quantize", blocks, "components", stored))
        rules.append(Rule(NamePatterns(every_linear=True), None))
    return QuantizationConfig(
        method="auto-round", path=fields.path, rules=tuple(rules), otherwise=stored
    )


def _stored(fields: Fields) -> StoredFormat:
    packing = PACKINGS[fields.get("packing_format") or DEFAULT]
    if packing == "awq":
        return awq_format(fields)
    return gptq_format(fields, {"checkpoint_format": packing})


def _blocks(fields: Fields) -> list[str]:
    """The blocks outside of which nothing is quantized; empty: no such restriction."""
    value = fields.get("block_name_to_quantize") or fields.get("to_quant_block_names") or []
    entries = value.split(",") if isinstance(value, str) else value
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise fields.error("block_name_to_quantize", value, "names are expected")
    return [entry.strip() for entry in entries if entry.strip()]
