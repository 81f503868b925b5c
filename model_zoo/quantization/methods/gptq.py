"""quant_method gptq: 4 or 8 bits in groups, with rules for single modules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model_zoo.json_fields import Fields
from model_zoo.quantization.methods.awq import group_size
from model_zoo.quantization.name_patterns import NamePatterns
from model_zoo.quantization.quantization_config import (
    QuantizationConfig,
    Rule,
    exclusions,
    rule,
    spelled,
)
from model_zoo.quantization.stored_format import StoredFormat

V1, V2 = "gptq", "gptq_v2"


def read(fields: Fields) -> QuantizationConfig:
    fields.refuse("is_marlin_format", _remedy("weights repacked for Marlin"))
    fields.choice("pack_dtype", ("int32",), "int32")
    stored = gptq_format(fields, {})
    everything, nothing = NamePatterns(every_linear=True), NamePatterns.parse
    rules = exclusions(fields, ("modules_to_not_convert",), "components")
    if not fields.flag("lm_head", False):
        rules.append(Rule(nothing(["lm_head"], "components"), None))
    rules.append(Rule(nothing(["embed_tokens"], "components"), None))
    rules += _dynamic(fields, stored)
    blocks = _inside_blocks(fields)
    if blocks:
        rules.append(rule(fields, "modules_in_block_to_quantize", blocks, "components", stored))
        rules.append(Rule(everything, None))
    return QuantizationConfig(method="gptq", path=fields.path, rules=tuple(rules), otherwise=stored)


def gptq_format(fields: Fields, values: Mapping[str, Any]) -> StoredFormat:
    """values: the fields, some of them overridden for one module."""
    own = fields.overridden(values)
    bits = spelled(own, "bits", "w_bit")
    if own.integer(bits) not in (4, 8):
        raise fields.error(bits, own.get(bits), "GPTQ is supported with 4 and 8 bits")
    packing = spelled(own, "checkpoint_format", "format")
    name = own.get(packing) or V1
    if name not in (V1, V2):
        raise fields.error(packing, name, _remedy(f"supported are {V1} and {V2}"))
    group = group_size(own)
    return StoredFormat(
        name="gptq",
        bits=own.integer(bits),
        strategy="channel" if group is None else "group",
        group=group,
        symmetric=own.flag("sym", True),
        act_order=own.flag("desc_act", False),
        zero_offset=1 if name == V1 else 0,
    )


def _remedy(problem: str) -> str:
    return f"{problem}: use a repository that GPTQModel wrote in the format {V1} or {V2}"


def _dynamic(fields: Fields, stored: StoredFormat) -> list[Rule]:
    """Expressions and what they change; `-:` is not quantized, `+:` or nothing overrides."""
    dynamic = fields.nested("dynamic")
    rules: list[Rule] = []
    for pattern in dynamic.values:
        overrides = dynamic.nested(pattern).values
        own = None if pattern.startswith("-:") else stored
        if own is not None and overrides:
            own = gptq_format(fields, overrides)
        expression = pattern.removeprefix("-:").removeprefix("+:")
        rules.append(rule(fields, "dynamic", [f"re:{expression}"], "name", own))
    return rules


def _inside_blocks(fields: Fields) -> list[str]:
    """The modules of a block that are quantized, which a file lists one by one or in groups."""
    value = fields.get("modules_in_block_to_quantize") or fields.get("inside_layer_modules") or []
    if not isinstance(value, list):
        raise fields.error("modules_in_block_to_quantize", value, "a list is expected")
    flat: list[Any] = []
    for entry in value:
        flat += entry if isinstance(entry, list) else [entry]
    if not all(isinstance(entry, str) for entry in flat):
        raise fields.error("modules_in_block_to_quantize", value, "names are expected")
    return flat
