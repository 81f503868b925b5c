"""TensorSpec: one tensor that a format stores of a Linear, and what it has to look like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.stored_format import StoredFormat

Shape = tuple[int, ...]
# What a file has of a Linear, by suffix (see tensor_name).
Present = Mapping[str, tuple[torch.dtype, Shape]]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    suffixes: tuple[str, ...]  # the names that it may have: `weight`, `_blocks`
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Shape, ...]  # empty: any, since it is not read
    required: bool = True

    def find(self, present: Mapping[str, object]) -> str | None:
        """The suffix that is there."""
        return next((suffix for suffix in self.suffixes if suffix in present), None)

    def problem(self, module: str, present: Present) -> str | None:
        """What is wrong with the tensor; None: nothing."""
        suffix = self.find(present)
        if suffix is None:
            if not self.required:
                return None
            names = " or ".join(tensor_name(module, suffix) for suffix in self.suffixes)
            return f"{names} is missing"
        if not self.shapes:
            return None
        dtype, shape = present[suffix]
        name = tensor_name(module, suffix)
        if dtype not in self.dtypes:
            return f"{name} is {_short(dtype)}: {' or '.join(map(_short, self.dtypes))} is expected"
        if shape not in self.shapes:
            shapes = " or ".join(dict.fromkeys(str(list(shape)) for shape in self.shapes))
            return f"{name} has shape {list(shape)}: {shapes} is expected"
        return None


class Reader(Protocol):
    """The module of a format."""

    @staticmethod
    def specs(stored: StoredFormat, shape: tuple[int, int]) -> tuple[TensorSpec, ...]:
        """The tensors of a weight of `shape`, [N, K]: that of the codes first."""
        ...

    @staticmethod
    def read(
        tensors: Mapping[str, Tensor], stored: StoredFormat, shape: tuple[int, int], name: str
    ) -> QuantizedWeight:
        """tensors: by suffix, as `specs` describes them."""
        ...


def tensor_name(module: str, suffix: str) -> str:
    """gpt-oss joins its suffixes, `_blocks`, without a dot."""
    return module + suffix if suffix.startswith("_") else f"{module}.{suffix}"


def ignored(*suffixes: str) -> tuple[TensorSpec, ...]:
    """Tensors that a file may have, and that a product with unquantized activations needs not."""
    return tuple(TensorSpec((suffix,), (), (), required=False) for suffix in suffixes)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
