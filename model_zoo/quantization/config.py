"""read_quantization: how the checkpoint in a directory is quantized.  Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model_zoo.json_fields import Fields
from model_zoo.quantization.methods import (
    auto_round,
    awq,
    compressed_tensors,
    fp8,
    gptq,
    modelopt,
    mxfp4,
)
from model_zoo.quantization.quantization_config import QuantizationConfig
from model_zoo.quantization.stored_format import StoredFormat

__all__ = ["QuantizationConfig", "StoredFormat", "read_quantization"]

METHODS: dict[str, Callable[[Fields], QuantizationConfig | None]] = {
    "fp8": fp8.read,
    "compressed-tensors": compressed_tensors.read,
    "awq": awq.read,
    "gptq": gptq.read,
    "auto-round": auto_round.read,
    "modelopt": modelopt.read,
    "mxfp4": mxfp4.read,
}
SPELLINGS = {
    "intel/auto-round": "auto-round",
    "modelopt-fp4": "modelopt",
    "modelopt-mixed": "modelopt",
}
REMEDY = (
    f"supported are {', '.join(METHODS)}: use a repository of this model that is quantized by one "
    "of them, or its unquantized repository"
)


def read_quantization(directory: Path | str) -> QuantizationConfig | None:
    """How the model in `directory` is quantized; None if it is not.

    Raises ModelError with file, field, value and remedy for a method or an option that no reader
    understands.
    """
    found = _find(Path(directory))
    if found is None:
        return None
    fields, method = found
    value = fields.get("quant_method")
    if value is not None:
        method = str(value).lower().replace("_", "-")
        method = SPELLINGS.get(method, method)
    elif method is None:
        if fields.get("quant_algo") is None:
            raise fields.error("quant_method", None, REMEDY)
        method = "modelopt"
    if method not in METHODS:
        raise fields.error("quant_method", value, f"this method is not supported: {REMEDY}")
    return METHODS[method](fields)


def _find(directory: Path) -> tuple[Fields, str | None] | None:
    """-> (fields, the method if the file's name says it); None if nothing is quantized."""
    path = directory / "config.json"
    if path.is_file():
        top = Fields.read(path)
        for outer in (top, top.nested("text_config")):
            for name in ("quantization_config", "compression_config"):
                if outer.get(name):
                    return outer.nested(name), None
    for name, method in (
        ("hf_quant_config.json", "modelopt"),
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
    ):
        if (directory / name).is_file():
            return Fields.read(directory / name), method
    return None
