"""PackedWeight: a quantized weight in the order in which kernels read it.

A word of 32 bits holds n = 16 / bits pairs of codes; the codes of pair i are at bits `bits * i`
and 16 + `bits * i`, so that a mask leaves one pair in the two halves of a register.  A block is 16
words, 32 * n columns (64 of 8 bits, 128 of 4 bits), word 4 t + u of which holds, at pair i and half
e, column 8 (n u + i) + 2 t + e.  Thread t of four in a row of wgmma's operand A reads columns
8 p + 2 t + e for p = 0, 1, ...: its share of a block is four consecutive words, and pairs 2 s and
2 s + 1 of them are its operand of the block's 16 columns s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_zoo.quantization.quantized_weight import BITS, CodeKind, QuantizedWeight

WORDS = 16  # in a block


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [N, K] for the kernels; fields as in QuantizedWeight, but for order and dtype."""

    kind: CodeKind
    words: Tensor  # [N, K * bits / 32] int32
    # row_group 1: [K / column_group, N] of the checkpoint's dtype (fp4: uint8, the scale's bits);
    # else [ceil(N / row_group), ceil(K / column_group)] float32
    scales: Tensor
    row_group: int
    column_group: int
    zeros: Tensor | None = None  # [K / column_group, N] uint8
    row_scales: Tensor | None = None  # [N] float32
    permutation: Tensor | None = None  # [K] int64

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return len(self.words), self.words.shape[1] * 32 // BITS[self.kind]

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes that a product reads."""
        tensors = self.words, self.scales, self.zeros, self.row_scales
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def block_columns(bits: int) -> int:
    """Columns of a block; a packed weight's K is a multiple of it."""
    return 32 * (16 // bits)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """codes [N, K] uint8 -> words [N, K * bits / 32] int32; K a multiple of block_columns(bits)."""
    pairs = 16 // bits
    rows = len(codes)
    grouped = codes.view(rows, -1, 4, pairs, 4, 2)  # row, block, u, i, t, e
    words = torch.zeros(rows, grouped.shape[1], 4, 4, dtype=torch.int32, device=codes.device)
    for i in range(pairs):
        for e in range(2):
            words |= grouped[:, :, :, i, :, e].int().transpose(2, 3) << (16 * e + bits * i)
    return words.view(rows, -1)


def unpack_codes(words: Tensor, bits: int) -> Tensor:
    """words [N, W] int32 -> codes [N, 32 * W / bits] uint8: the inverse of pack_codes."""
    pairs, rows = 16 // bits, len(words)
    grouped = words.view(rows, -1, 4, 4).transpose(2, 3)  # row, block, u, t
    shape = (rows, grouped.shape[1], 4, pairs, 4, 2)
    codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
    for i in range(pairs):
        for e in range(2):
            part = (grouped >> (16 * e + bits * i)) & ((1 << bits) - 1)
            codes[:, :, :, i, :, e] = part.to(torch.uint8)
    return codes.view(rows, -1)


def pack(weight: QuantizedWeight) -> PackedWeight:
    """The same weight in the kernels' order."""
    blocks = weight.row_group > 1
    scales = weight.scales.float() if blocks else weight.scales.t().contiguous()
    if weight.kind == "fp4":
        scales = scales.view(torch.uint8)
    return PackedWeight(
        kind=weight.kind,
        words=pack_codes(weight.codes, BITS[weight.kind]),
        scales=scales,
        row_group=weight.row_group,
        column_group=weight.column_group,
        zeros=None if weight.zeros is None else weight.zeros.t().contiguous(),
        row_scales=weight.row_scales,
        permutation=weight.permutation,
    )


def byte_columns(device: torch.device) -> Tensor:
    """[64] int64: the column of each byte of a block of 8-bit codes."""
    columns = torch.arange(64, dtype=torch.uint8, device=device)[None]
    return pack_codes(columns, 8).view(torch.uint8).flatten().long()
