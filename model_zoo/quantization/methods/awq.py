"""quant_method awq: 4-bit groups with zero points, packed for a product of x with W [K, N]."""

from __future__ import annotations

from model_zoo.json_fields import Fields
from model_zoo.quantization.name_patterns import NamePatterns
from model_zoo.quantization.quantization_config import (
    EMBEDDINGS,
    QuantizationConfig,
    Rule,
    exclusions,
    spelled,
)
from model_zoo.quantization.stored_format import StoredFormat


def read(fields: Fields) -> QuantizationConfig:
    version = spelled(fields, "version", "checkpoint_format", "format")
    if str(fields.get(version) or "gemm").lower() != "gemm":
        raise fields.error(
            version,
            fields.get(version),
            "only the packing `gemm` of AWQ is supported: use a repository with that version, or "
            "with GPTQ or compressed-tensors",
        )
    fields.choice("backend", ("autoawq",), "autoawq")
    return QuantizationConfig(
        method="awq",
        path=fields.path,
        rules=(
            *exclusions(fields, ("modules_to_not_convert",), "substring"),
            Rule(NamePatterns.parse(EMBEDDINGS, "components"), None),
        ),
        otherwise=awq_format(fields),
    )


def awq_format(fields: Fields) -> StoredFormat:
    bits = spelled(fields, "bits", "w_bit")
    if fields.integer(bits) != 4:
        raise fields.error(bits, fields.get(bits), "AWQ is supported with 4 bits only")
    group = group_size(fields)
    has_zeros = fields.flag("zero_point", not fields.flag("sym", False))
    return StoredFormat(
        name="awq",
        bits=4,
        strategy="channel" if group is None else "group",
        group=group,
        symmetric=not has_zeros,
    )


def group_size(fields: Fields) -> int | None:
    """Columns of a group; None: the whole row, which is -1 in a file."""
    name = spelled(fields, "group_size", "q_group_size")
    return None if fields.get(name) == -1 else fields.integer(name)
