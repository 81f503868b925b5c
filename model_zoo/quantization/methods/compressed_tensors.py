"""quant_method compressed-tensors: groups of modules, each with its scheme."""

from __future__ import annotations

import itertools
from typing import Literal

from model_zoo.json_fields import Fields
from model_zoo.quantization.methods.fp8 import block_size
from model_zoo.quantization.name_patterns import CLASS_NAMES, REGEX
from model_zoo.quantization.quantization_config import QuantizationConfig, Rule, exclusions, rule
from model_zoo.quantization.stored_format import StoredFormat, Strategy, fp8_format

Format = Literal[
    "pack-quantized",
    "float-quantized",
    "int-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
]
# Type and bits of the codes that a format can hold.
FORMATS: dict[Format, tuple[tuple[str, int], ...]] = {
    "pack-quantized": (("int", 4), ("int", 8)),
    "float-quantized": (("float", 8),),
    "int-quantized": (("int", 8),),
    "nvfp4-pack-quantized": (("float", 4),),
    "mxfp4-pack-quantized": (("float", 4),),
}
UNNAMED = (None, "mixed-precision", "naive-quantized")  # the scheme says what the format is
FP4_GROUPS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
REMEDY = f"supported are {', '.join(FORMATS)}: use another repository of this model"


def read(fields: Fields) -> QuantizationConfig:
    _refuse_transforms(fields)
    groups = fields.nested("config_groups")
    if not groups.values:
        raise fields.error("config_groups", None, "at least one group is expected")
    # A module's own name goes before expressions, and these before the class of all.
    ranks: tuple[list[Rule], ...] = ([], [], [])
    for name in groups.values:
        group = groups.nested(name)
        stored = _stored(group, fields)
        targets: tuple[list[str], ...] = ([], [], [])
        for target in group.strings("targets") or ("Linear",):
            targets[2 if target in CLASS_NAMES else target.startswith(REGEX)].append(target)
        for rules, entries in zip(ranks, targets, strict=True):
            if entries:
                rules.append(rule(group, "targets", entries, "name", stored))
    return QuantizationConfig(
        method="compressed-tensors",
        path=fields.path,
        rules=(*exclusions(fields, ("ignore",), "name"), *itertools.chain(*ranks)),
        otherwise=None,
    )


def _refuse_transforms(fields: Fields) -> None:
    if fields.nested("transform_config").nested("config_groups").values:
        raise fields.error(
            "transform_config", "config_groups", "rotated weights are not supported: " + REMEDY
        )
    sparsity = fields.nested("sparsity_config").get("format")
    if sparsity not in (None, "dense"):
        raise fields.nested("sparsity_config").error(
            "format", sparsity, "sparse weights are not supported: " + REMEDY
        )


def _stored(group: Fields, fields: Fields) -> StoredFormat | None:
    """None: the group's weights are not quantized."""
    weights = group.nested("weights")
    if not weights.values:
        return None
    bits = weights.integer("num_bits")
    kind = weights.choice("type", ("int", "float"), "int")
    weights.refuse("dynamic", "only weights with scales in the files are supported")
    where = group if group.get("format") is not None else fields
    name = where.get("format")
    if name in UNNAMED:
        unpacked = name == "naive-quantized" or _takes_integers(group)
        name = _format_of(weights, kind, bits, unpacked=unpacked)
    elif not isinstance(name, str) or name not in FORMATS:
        raise where.error("format", name, REMEDY)
    if (kind, bits) not in FORMATS[name]:
        held = " or ".join(f"{kind} of {bits} bits" for kind, bits in FORMATS[name])
        raise weights.error("num_bits", bits, f"{name} with type {kind}: {held} is expected")
    return _scheme(weights, group.nested("input_activations"), name, bits)


def _takes_integers(group: Fields) -> bool:
    return group.nested("input_activations").get("type") == "int"


def _format_of(weights: Fields, kind: str, bits: int, *, unpacked: bool) -> Format:
    match kind, bits:
        case "float", 8:
            return "float-quantized"
        case "float", 4:
            group = weights.get("group_size")
            return "mxfp4-pack-quantized" if group == 32 else "nvfp4-pack-quantized"
        case "int", 8 if unpacked:
            return "int-quantized"
        case "int", (4 | 8):
            return "pack-quantized"
    raise weights.error("num_bits", bits, f"no format for type {kind}: 4 and 8 bits are supported")


def _scheme(weights: Fields, activations: Fields, name: Format, bits: int) -> StoredFormat:
    group = weights.get("group_size")
    if group == -1:
        group = None
    elif group is not None:
        group = weights.integer("group_size")
    strategy = weights.get("strategy") or ("tensor" if group is None else "group")
    symmetric = weights.flag("symmetric", True)
    if name == "nvfp4-pack-quantized" or name == "mxfp4-pack-quantized":
        if group != FP4_GROUPS[name]:
            raise weights.error("group_size", group, f"{name} has groups of {FP4_GROUPS[name]}")
        return StoredFormat(name=name, bits=4, strategy="group", group=group)
    supported: dict[Format, tuple[Strategy, ...]] = {
        "pack-quantized": ("channel", "group"),
        "float-quantized": ("tensor", "channel", "block"),
        "int-quantized": ("tensor", "channel"),
    }
    if strategy not in supported[name]:
        choices = ", ".join(supported[name])
        raise weights.error("strategy", strategy, f"supported for {name}: {choices}")
    if name == "float-quantized":
        block = block_size(weights, "block_structure") if strategy == "block" else None
        if strategy == "block" and block is None:
            raise weights.error("block_structure", None, "the size of a block is expected")
        return fp8_format(strategy, block, activation_bits=8 if activations.values else 16)
    if name == "int-quantized" and not symmetric:
        raise weights.error("symmetric", False, "only symmetric int8 weights are supported")
    integers = name == "int-quantized" and _are_int8(activations)
    return StoredFormat(
        name=name,
        bits=bits,
        strategy=strategy,
        group=group if strategy == "group" else None,
        symmetric=symmetric,
        act_order=_act_order(weights),
        activation_bits=8 if integers else 16,
        activation_zeros=integers and not activations.flag("symmetric", True),
    )


def _are_int8(activations: Fields) -> bool:
    """Others than int8 are multiplied unquantized, which is more exact."""
    return (activations.get("type"), activations.get("num_bits")) == ("int", 8)


def _act_order(weights: Fields) -> bool:
    """Whether the columns of a group are not neighbours.

    "group", of which `true` and "dynamic" are other spellings, stores the group of each column;
    "weight" and "static" reorder nothing.
    """
    value = weights.get("actorder")
    if isinstance(value, bool):
        return value
    known = ("group", "dynamic", "weight", "static")
    return value is not None and weights.choice("actorder", known) in ("group", "dynamic")
