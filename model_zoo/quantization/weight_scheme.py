"""WeightScheme: the parameters of a Linear whose weight is quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from model_zoo.quantization.quantized_weight import BITS, CodeKind
from model_zoo.quantization.stored_format import FormatName, StoredFormat

# Columns whose products, of two numbers of 8 bits and with a zero point, have a sum of 32 bits.
INT32_COLUMNS = 1 << 16
BLOCK = 128  # columns: K is a multiple, as the packed order of 4 bits asks for
Parameters = dict[str, tuple[tuple[int, ...], torch.dtype]]  # name -> shape, dtype
KINDS: dict[FormatName, CodeKind] = {
    "fp8": "fp8",
    "int-quantized": "int8",
    "nvfp4": "fp4",
    "nvfp4-pack-quantized": "fp4",
    "mxfp4": "fp4",
    "mxfp4-pack-quantized": "fp4",
}
SECOND_SCALE: tuple[FormatName, ...] = ("nvfp4", "nvfp4-pack-quantized")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """How a weight [N, K] is stored and multiplied; fields as in QuantizedWeight.

    Layers of the checkpoint can be fused into one Linear if their schemes are equal.
    """

    kind: CodeKind
    row_group: int
    column_group: int
    scale_dtype: torch.dtype  # fp4: uint8, as PackedWeight has them
    zeros: bool = False
    row_scales: bool = False
    permuted: bool = False
    activation_bits: int = 16  # 8: products may quantize activations, too (fp8; int8 of rows)
    activation_zeros: bool = False  # with a zero point a row: int8

    def parameters(self, outputs: int, inputs: int) -> Parameters:
        """The parameters of PackedWeight for N outputs and K inputs."""
        groups = -(-inputs // self.column_group)
        together = scales_together(self.row_group, self.column_group)
        grouped: tuple[int, ...] = (groups, outputs)
        if self.row_group > 1:
            grouped = (-(-outputs // self.row_group), groups)
        elif together > 1:
            grouped = (-(-groups // together), outputs, together)
        found: Parameters = {
            "words": ((outputs, inputs * BITS[self.kind] // 32), torch.int32),
            "scales": (grouped, self.scale_dtype),
        }
        if self.zeros:
            found["zeros"] = (grouped, torch.uint8)
        if self.row_scales:
            found["row_scales"] = ((outputs,), torch.float32)
        if self.activation_zeros:
            found["sums"] = ((outputs,), torch.int32)
        if self.permuted:
            found["permutation"] = ((inputs,), torch.int64)
        return found

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Of these parameters."""
        found = self.parameters(outputs, inputs).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in found)

    def fits(self, outputs: int, inputs: int) -> bool:
        """Whether the kernels can multiply a weight of this shape, or a part of a fused one."""
        return inputs % BLOCK == 0 and self.has_whole_groups(outputs, inputs)

    def has_whole_groups(self, outputs: int, inputs: int) -> bool:
        """The same where columns are padded to whole blocks, as those of experts are."""
        whole = self.row_group > 1 or inputs % self.column_group == 0
        return outputs % self.row_group == 0 and whole

    def is_exact(self, inputs: int) -> bool:
        """Whether products multiply the codes, and the scales their sums; inputs: K

        Else weights are rounded to 16 bits, in some products at least.
        """
        by_row = self.row_group == 1 and self.column_group >= inputs
        return by_row and (self.kind == "fp8" or self.multiplies_integers)

    @property
    def multiplies_integers(self) -> bool:
        """Whether products of many rows are those of int8 weights and int8 activations."""
        known = self.kind == "int8" and self.activation_bits == 8
        return known and self.column_group <= INT32_COLUMNS

    def describe(self, inputs: int) -> str:
        """`int4 in groups of 128`; inputs: K"""
        if self.row_group > 1:
            scales = f"blocks of {self.row_group} x {self.column_group}"
        elif self.column_group >= inputs:
            scales = "rows"
        else:
            scales = f"groups of {self.column_group}"
        zeros = ", zero points" if self.zeros else ""
        order = ", act-order" if self.permuted else ""
        only = ", W8A16" if self.kind in ("fp8", "int8") and self.activation_bits == 16 else ""
        if self.activation_zeros:
            only = ", activations with zero points"
        return f"{self.kind} in {scales}{zeros}{order}{only}"


def scheme_for(
    stored: StoredFormat, inputs: int, scale_dtype: torch.dtype | None = None
) -> WeightScheme:
    """How a weight with K = inputs is packed.

    scale_dtype: of the files; None: that in which files of the format usually have them, float16
                 for AWQ and GPTQ, else bfloat16
    """
    kind: CodeKind = KINDS.get(stored.name) or ("int4" if stored.bits == 4 else "int8")
    assert BITS[kind] == stored.bits
    row_group, column_group = stored.block or (1, stored.group or inputs)
    usual = torch.float16 if stored.name in ("awq", "gptq") else torch.bfloat16
    dtypes = {"fp8": torch.float32, "fp4": torch.uint8}
    return WeightScheme(
        kind=kind,
        row_group=row_group,
        column_group=column_group,
        scale_dtype=dtypes.get(kind) or scale_dtype or usual,
        zeros=kind in ("int4", "int8") and not stored.symmetric,
        row_scales=stored.name in SECOND_SCALE,
        permuted=stored.act_order,
        activation_bits=stored.activation_bits,
        activation_zeros=stored.activation_zeros,
    )


def scales_together(row_group: int, column_group: int) -> int:
    """Groups of columns of a row whose scales a PackedWeight has together: those of 128 columns."""
    if row_group > 1 or BLOCK % column_group:
        return 1
    return BLOCK // column_group
