"""The reader of each format: which tensors a Linear has, and the weight that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from model_zoo.json_fields import ModelError
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.readers import awq, fp4, fp8, gptq, int8, packed_int
from model_zoo.quantization.readers.tensor_spec import Present, Reader, TensorSpec, tensor_name
from model_zoo.quantization.stored_format import FormatName, StoredFormat

READERS: dict[FormatName, Reader] = {
    "fp8": fp8,
    "int-quantized": int8,
    "pack-quantized": packed_int,
    "nvfp4-pack-quantized": fp4,
    "mxfp4-pack-quantized": fp4,
    "nvfp4": fp4,
    "mxfp4": fp4,
    "awq": awq,
    "gptq": gptq,
}


def _suffixes() -> Iterator[str]:
    for name, reader in READERS.items():
        for symmetric in (True, False):
            any_scheme = StoredFormat(
                name=name, bits=4, strategy="channel", group=32, symmetric=symmetric
            )
            for spec in reader.specs(any_scheme, (32, 32)):
                yield from spec.suffixes


# Every suffix that a tensor of a quantized Linear can have.
SUFFIXES = frozenset(_suffixes())


def specs(stored: StoredFormat, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
    """The tensors of a Linear with a weight of `shape`, [N, K]: that of the codes first."""
    return READERS[stored.name].specs(stored, shape)


def problem(
    name: str, shape: tuple[int, int], stored: StoredFormat, present: Present
) -> str | None:
    """What keeps the tensors of the Linear `name` from being a weight of `shape`; None: nothing."""
    found = (spec.problem(name, present) for spec in specs(stored, shape))
    return next((text for text in found if text is not None), None)


def check(name: str, shape: tuple[int, int], stored: StoredFormat, present: Present) -> None:
    """Raises ModelError if a tensor is missing, or has another dtype or shape."""
    text = problem(name, shape, stored, present)
    if text is not None:
        raise ModelError(
            f"{text} for a weight {list(shape)} of the format {stored}: the download is not "
            "complete, or config.json belongs to another model: download both again"
        )


def read(
    tensors: Mapping[str, Tensor], stored: StoredFormat, shape: tuple[int, int], name: str
) -> QuantizedWeight:
    """The weight of the Linear `name`, [N, K] = shape, on the device of its tensors.

    tensors: by suffix; `check` has accepted them.  Raises ModelError for scales that cannot be.
    """
    return READERS[stored.name].read(tensors, stored, shape, name)


def split_name(tensor: str) -> tuple[str, str] | None:
    """`a.q_proj.weight_scale` -> (`a.q_proj`, `weight_scale`); None: of no quantized Linear."""
    for suffix in ("_blocks", "_scales"):
        if tensor.endswith(suffix):
            return tensor.removesuffix(suffix), suffix
    module, dot, suffix = tensor.rpartition(".")
    if not dot or suffix not in SUFFIXES:
        return None
    assert tensor_name(module, suffix) == tensor
    return module, suffix
