"""quant_method mxfp4: the experts of gpt-oss."""

from __future__ import annotations

from model_zoo.json_fields import Fields
from model_zoo.quantization.name_patterns import NamePatterns
from model_zoo.quantization.quantization_config import (
    EMBEDDINGS,
    QuantizationConfig,
    Rule,
    exclusions,
)
from model_zoo.quantization.stored_format import StoredFormat


def read(fields: Fields) -> QuantizationConfig:
    return QuantizationConfig(
        method="mxfp4",
        path=fields.path,
        rules=(
            *exclusions(fields, ("modules_to_not_convert",), "components"),
            Rule(NamePatterns.parse(EMBEDDINGS, "components"), None),
        ),
        otherwise=StoredFormat(name="mxfp4", bits=4, strategy="group", group=32),
    )
