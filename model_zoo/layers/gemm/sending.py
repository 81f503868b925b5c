"""x W^T of many rows, stored in this GPU's memory and in that of others at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from model_zoo.layers.gemm.bands import tile_grid


@dataclass(frozen=True, slots=True)
class SendingGemm:
    """hopper/sending_gemm.py: compute capability 9.0, no bias.

    paced       stores of a tile are spread over the time in which the next one is multiplied
    piece_rows  8, 16, 32 or 64 rows of 64 numbers are stored at a time, if paced
    """

    paced: bool = True
    piece_rows: int = 8
    name = "sending (Hopper)"

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        """Whether rows are 16-byte aligned, and at least as long as the ring of stages."""
        return rows > 0 and outputs > 0 and outputs % 8 == 0 and inputs % 8 == 0 and inputs >= 192

    def run_into(self, x: Tensor, weight: Tensor, outs: Sequence[Tensor]) -> None:
        """x W^T into each of `outs`, 0.0 for -0.0.

        x       [M, K], bf16 or fp16, with contiguous rows
        weight  [N, K], of x's dtype
        outs    1 to 8 of [M, N] and x's dtype, contiguous, at 16-byte aligned addresses; some may
                be memory of other GPUs that this one can write
        """
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.gemm.hopper.many_rows import DEPTH, HALF, ROWS
        from model_zoo.layers.gemm.hopper.paced_stores import PIECE_COLUMNS
        from model_zoo.layers.gemm.hopper.sending_gemm import MAX_OUTS, WIDTH, sending_gemm_hopper

        (rows, inputs), outputs = x.shape, len(weight)
        assert self.serves(rows, outputs, inputs) and x.stride(1) == 1
        assert 1 <= len(outs) <= MAX_OUTS
        for out in outs:
            assert out.shape == (rows, outputs) and out.dtype == x.dtype and out.is_contiguous()
        grid = tile_grid(x.device, rows, outputs, inputs, width=WIDTH.value)
        whole, piece = [ROWS.value, WIDTH.value], [self.piece_rows, PIECE_COLUMNS.value]
        sending_gemm_hopper[(grid.programs,)](
            tma_desc(x, [ROWS.value, DEPTH.value]), tma_desc(weight, [HALF.value, DEPTH.value]),
            *(tma_desc(out, piece if self.paced else whole) for out in outs),
            *[None] * (MAX_OUTS - len(outs)), grid.m_tiles, grid.n_tiles, grid.k_blocks, grid.band,
            PACED=self.paced, num_warps=4, maxnreg=168, **dependent_launch(x.device),
        )  # fmt: skip
