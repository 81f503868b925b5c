"""StoredFormat: how the files of a checkpoint store one quantized Linear.  Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Each has a module in readers/, which says what its tensors are.
FormatName = Literal[
    "fp8",  # weight e4m3, and weight_scale or weight_scale_inv: fp8, compressed-tensors, ModelOpt
    "int-quantized",  # weight int8 and weight_scale: compressed-tensors W8A8
    "pack-quantized",  # weight_packed int32: compressed-tensors W4A16 and W8A16
    "nvfp4-pack-quantized",  # weight_packed uint8 and weight_global_scale: compressed-tensors
    "mxfp4-pack-quantized",  # weight_packed uint8 and weight_scale uint8: compressed-tensors
    "nvfp4",  # weight uint8 and weight_scale_2: ModelOpt
    "mxfp4",  # _blocks and _scales: gpt-oss
    "awq",
    "gptq",
]
Strategy = Literal["tensor", "channel", "group", "block"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How a weight [N, K] is stored."""

    name: FormatName
    bits: int  # of a code
    strategy: Strategy  # which codes share a scale: all, a row's, a group of a row's, a block's
    group: int | None = None  # columns of a group
    block: tuple[int, int] | None = None  # rows and columns of a block
    symmetric: bool = True  # there are no zero points, or they are ignored
    act_order: bool = False  # GPTQ's desc_act: g_idx has the group of each column
    activation_bits: int = 16  # that products are meant for; 8: W8A8
    activation_zeros: bool = False  # activations are meant to have zero points, too
    zero_offset: int = 0  # what GPTQ v1 subtracts from a zero point before it stores it

    def groups(self, columns: int) -> int:
        """Scales of a row of `columns` codes, for the strategies channel and group."""
        return 1 if self.group is None else -(-columns // self.group)

    def __str__(self) -> str:
        """`gptq, 4 bits, group 128`."""
        parts = [self.name, f"{self.bits} bits"]
        if self.strategy == "group":
            parts.append(f"group {self.group}")
        elif self.strategy == "block":
            assert self.block is not None
            parts.append(f"block {self.block[0]} x {self.block[1]}")
        else:
            parts.append(f"one scale a {'row' if self.strategy == 'channel' else 'tensor'}")
        return ", ".join(parts)


def fp8_format(
    strategy: Strategy, block: tuple[int, int] | None = None, *, activation_bits: int = 8
) -> StoredFormat:
    return StoredFormat(
        name="fp8", bits=8, strategy=strategy, block=block, activation_bits=activation_bits
    )


ONLINE = fp8_format("channel")  # of `--quantization fp8`
