"""Implementations of y = x W^T for few rows, as values that autotune.py times and Linear runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.all_reduce.symmetric_buffers import RankSum
from model_zoo.layers.normed_rows import Norm, NormedRows

PARTS_BYTES = 32 << 20
SHARED_BYTES = 227 * 1024 - 2048  # of rings on Hopper; the rest for barriers and the epilogue
TILES = 1 << 14
MAX_RANK_TILE = 2048  # numbers of a tile that is added over ranks


@cache
def workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """-> (partial sums float32, arrival counts int32 of each tile).

    A GEMM finds the counts at zero and resets them, so that GEMMs must run one after the other, on
    one stream or by dependent launches, as a model's layers do.
    """
    with torch.inference_mode(False):  # kept, so that others may write to it outside of it, too
        parts = torch.empty(PARTS_BYTES // 4, dtype=torch.float32, device=device)
        return parts, torch.zeros(TILES, dtype=torch.int32, device=device)


BUCKETS = (1, 8, 16, 32, 64)  # numbers of rows that are tuned; each covers smaller ones
MAX_ROWS = BUCKETS[-1]
# Numbers above that are tuned, too, of quantized weights on Hopper that cuBLAS does not multiply as
# they are.
MANY_BUCKETS = (128, 256, 512)


class Weight(Protocol):
    """A weight [N, K]: a Tensor, or a PackedWeight."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def nbytes(self) -> int: ...


class GemmImpl(Protocol):
    @property
    def name(self) -> str:
        """What it does, as the start report says it: the same for all its configurations."""
        ...

    def run(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N], or SwiGLU of it [M, N / 2].

        weight: a Tensor, or a PackedWeight for the GEMMs of quantized_gemm/.
        """
        ...


# Of weights that a multiprocessor asks for at once: two to three times what an H200's memory has to
# deliver within its latency.  With more, what others read waits behind them: norms between GEMMs of
# eight rows took 5.1 us with 192 KiB and 4.1 with 96; with 64 KiB or fewer GEMMs were slower.
IN_FLIGHT = 96 << 10

Gate = Literal["silu", "gelu"]  # gelu: its approximation by tanh


class GatingGemm(ABC):
    """A GEMM of few rows that can also compute the gated activation of its output."""

    __slots__ = ()

    @abstractmethod
    def multiply(self, x: Any, weight: Any, bias: Tensor | None, gate: Gate | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]; with a gate [M, N / 2]: the
        activation of its first half times its second.  x: a Tensor, or for a QuantizedRowsGemm
        QuantizedRows."""

    @abstractmethod
    def gates(self, rows: int, weight: Any) -> bool:
        """Whether it computes a gate of so many rows of x.

        Gates and ups meet in shared memory, for which the largest rings leave no room.
        """

    def run(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """As GemmImpl.run."""
        return self.multiply(x, weight, bias, None)


class NormingGemm(GatingGemm):
    """A GEMM of few rows that can also do its part of what add_rms_norm does between two GEMMs.

    `multiply` takes NormedRows, too.
    """

    __slots__ = ()

    @abstractmethod
    def norms(self, rows: int) -> bool:
        """Whether `multiply` takes NormedRows of so many rows, and add_to so many."""

    @abstractmethod
    def adds_ranks(self, rows: int) -> bool:
        """Whether add_to takes a rank_sum of so many rows."""

    def for_steps(self, weight: Any) -> Sequence[NormingGemm]:
        """Configurations with the same compiled code that are to be compared in a step: their own
        times do not show how long other kernels wait for memory behind them."""
        return ()

    @abstractmethod
    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Any,
        bias: Tensor | None,
        norm: Norm,
        *,
        rank_sum: RankSum | None = None,
    ) -> NormedRows:
        """residual [M, N], contiguous, += x W^T + bias, rounded as PyTorch's operations are.

        -> the norm of the sum.  x shares no memory with the residual, which some programs write
        while others read x.

        rank_sum  x W^T + bias is a part of it, and those of all ranks are added; None: it is the
                  whole product
        """


def units_in_flight(
    unit_bytes: int, stages: int, resident: int = 1, in_flight: int = IN_FLIGHT
) -> int:
    """Units of a ring that one of `resident` programs of a multiprocessor asks for at once."""
    return max(1, min(stages, -(-in_flight // (resident * unit_bytes))))


@dataclass(frozen=True, slots=True)
class CublasGemm:
    """cuBLAS, with x zero-padded to `rows` rows, for which it may have a faster kernel."""

    name = "cuBLAS"
    rows: int = 0

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        return rows < self.rows or self.rows == 0

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if len(x) >= self.rows:
            return F.linear(x, weight, bias)
        return F.linear(F.pad(x, (0, 0, 0, self.rows - len(x))), weight, bias)[: len(x)]


@dataclass(frozen=True, slots=True)
class SplitK:
    """split_k.py: any GPU from compute capability 8.0 on."""

    name = "split-K"
    block_n: int
    block_k: int
    parts: int  # split-K: programs per tile of block_n weight rows
    warps: int = 4
    stages: int = 4

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        tiles, blocks = -(-outputs // self.block_n), -(-inputs // self.block_k)
        parts_bytes = 4 * tiles * self.parts * self.block_n * block_m(rows, 16)
        fits = self.parts == 1 or (tiles <= TILES and parts_bytes <= PARTS_BYTES)
        return rows <= MAX_ROWS and inputs % 8 == 0 and self.parts <= blocks and fits

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x [M, K], weight [N, K], bias [N] -> x W^T + bias [M, N]."""
        from attention.common.dependent_launch import dependent_launch
        from model_zoo.layers.gemm.split_k import _split_k

        (rows, inputs), outputs = x.shape, len(weight)
        assert self.serves(rows, outputs, inputs) and x.stride(1) == 1
        out = x.new_empty(rows, outputs)
        parts, arrived = workspace(x.device)
        blocks = -(-inputs // self.block_k)
        per_part = -(-blocks // self.parts)
        _split_k[(-(-outputs // self.block_n), -(-blocks // per_part))](
            weight, x, bias, parts, arrived, out, rows, outputs, inputs, x.stride(0), per_part,
            BLOCK_M=block_m(rows, 16), BLOCK_N=self.block_n, BLOCK_K=self.block_k,
            num_warps=self.warps, num_stages=self.stages, **dependent_launch(x.device),
        )  # fmt: skip
        return out


@dataclass(frozen=True, slots=True)
class SkinnyGemm(NormingGemm):
    """hopper/skinny_gemm.py: compute capability 9.0."""

    name = "few rows (Hopper)"
    block_n: int  # weight rows of a tile: 16, 32, 64 or 128
    block_k: int  # columns of a unit: a multiple of 64, of 128 for 32 rows, of 256 for 16
    stages: int  # units of weights in a program's ring
    programs: int
    split_units: int = 1  # tiles are split at multiples of this; divides a tile's units
    x_stages: int = 3  # units of x in a ring of their own, which come from L2; at most stages

    @property
    def fold(self) -> int:
        """Column runs of a unit that are stacked to the 64 rows of a wgmma."""
        return max(1, 64 // self.block_n)

    def serves(self, rows: int, outputs: int, inputs: int) -> bool:
        tiles, blocks = -(-outputs // self.block_n), -(-inputs // self.block_k)
        parts_bytes = 4 * 2 * self.programs * self.block_n * block_m(rows, 8)
        fits = tiles <= TILES and parts_bytes <= PARTS_BYTES and self.x_stages <= self.stages
        width = self.fold * block_m(rows, 8)  # of a wgmma; a wider one is slower than memory
        fits = fits and rows <= MAX_ROWS and width <= 2 * MAX_ROWS
        return fits and inputs % 8 == 0 and blocks % self.split_units == 0

    def gates(self, rows: int, weight: Tensor) -> bool:
        """As GatingGemm.gates."""
        height = block_m(rows, 8)
        columns = self.stages * self.block_n + self.x_stages * height
        rings = columns * self.block_k * weight.element_size()
        return rings + 4 * self.block_n * height <= SHARED_BYTES

    def multiply(
        self, x: Tensor | NormedRows, weight: Tensor, bias: Tensor | None, gate: Gate | None
    ) -> Tensor:
        """As GatingGemm.multiply; x may be NormedRows."""
        out = weight.new_empty(len(x), len(weight) // (1 if gate is None else 2))
        self._launch(x, weight, bias, out, gate)
        return out

    def norms(self, rows: int) -> bool:
        """As NormingGemm.norms."""
        return rows <= MAX_ROWS

    def adds_ranks(self, rows: int) -> bool:
        """As NormingGemm.adds_ranks: of larger tiles not all registers suffice."""
        return self.block_n * block_m(rows, 8) <= MAX_RANK_TILE

    def add_to(
        self,
        residual: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Norm,
        *,
        rank_sum: RankSum | None = None,
    ) -> NormedRows:
        """As NormingGemm.add_to."""
        assert residual.is_contiguous() and residual.dtype == weight.dtype
        normed = NormedRows.room_for(residual, -(-len(weight) // self.block_n), norm)
        self._launch(x, weight, bias, residual, None, normed, rank_sum)
        return normed

    def _launch(
        self,
        x: Tensor | NormedRows,
        weight: Tensor,
        bias: Tensor | None,
        out: Tensor,
        gate: Gate | None,
        total: NormedRows | None = None,
        rank_sum: RankSum | None = None,
    ) -> None:
        """total: None, or out is the residual, and this is to be the norm of the sum"""
        from attention.common.dependent_launch import dependent_launch
        from attention.common.hopper import tma_desc
        from model_zoo.layers.gemm.hopper.skinny_gemm import _skinny_gemm

        plain, source = (x.weighted, x) if isinstance(x, NormedRows) else (x, None)
        (rows, inputs), outputs = plain.shape, len(weight)
        assert self.serves(rows, outputs, inputs) and plain.stride(1) == 1
        parts, arrived = workspace(plain.device)
        k_blocks, height = -(-inputs // self.block_k), block_m(rows, 8)
        units, columns = -(-outputs // self.block_n) * k_blocks, self.block_k // self.fold
        halves = 1 if gate is None else 2
        unit_bytes = self.block_n * self.block_k * weight.element_size()
        of_ranks, world = (out, out, arrived, 0, 0), 1  # Triton 3.6 takes no tuple with None
        if rank_sum is not None:
            of_ranks, world = _of_ranks(rank_sum, rows, outputs)
        _skinny_gemm[(min(self.programs, units // self.split_units),)](
            tma_desc(weight, [self.block_n // halves, columns]), tma_desc(plain, [height, columns]),
            parts, arrived, out, bias, *norm_arguments(out, parts, source, total), *of_ranks, rows,
            outputs, inputs, k_blocks, self.split_units, units_in_flight(unit_bytes, self.stages),
            FOLD=self.fold, STAGES=self.stages, X_STAGES=self.x_stages, GATE=gate or "",
            WORLD=world, num_warps=4,
            maxnreg=_registers(self.fold * self.block_n * self.fold * height, adds_ranks=world > 1),
            **dependent_launch(plain.device),
        )  # fmt: skip


def norm_arguments(
    out: Tensor, unused: Tensor, source: NormedRows | None, total: NormedRows | None
) -> tuple[Any, ...]:
    """What kernels take of the norms before and after a product: (WEIGHTED, SQUARES, X_SQUARES,
    NORM, adds, tiles, plus_one, eps).

    source  x is its `weighted`; None: x is what the GEMM multiplies
    total   out is a residual, and this is to be the norm of its sum with the product; or None
    unused  float32, in place of squares that there are none of
    """
    weighted, squares, weight, adds, plus_one = out, unused, out, 0, 0
    if total is not None:
        weighted, squares, weight, adds = total.weighted, total.squares, total.norm.weight, 1
        plus_one = int(total.norm.plus_one)
    x_squares, tiles, eps = unused, 0, 0.0
    if source is not None:
        x_squares, tiles, eps = source.squares, len(source.squares), source.norm.eps
    return weighted, squares, x_squares, weight, adds, tiles, plus_one, eps


def _of_ranks(rank_sum: RankSum, rows: int, size: int) -> tuple[tuple[Any, ...], int]:
    """What kernels take of it: (OUTGOING, INCOMING, LIMIT, sender_stride, rank), and WORLD."""
    buffers = rank_sum.buffers
    assert rows <= buffers.max_rows and size == buffers.size
    incoming, sender_stride = rank_sum.incoming()
    kernel_arguments = rank_sum.outgoing(), incoming, buffers.limit, sender_stride, buffers.rank
    return kernel_arguments, buffers.world


def block_m(rows: int, least: int) -> int:
    """The tile height for `rows` rows of x: the next power of two, at least `least`."""
    return max(least, 1 << (rows - 1).bit_length())


def _registers(sums: int, *, adds_ranks: bool = False) -> int:
    """Registers per thread of SkinnyGemm for an accumulator of `sums` elements, without spills."""
    if adds_ranks:
        return 96 if sums < 2048 else 144 if sums < 4096 else 240
    return 96 if sums < 4096 else 184 if sums < 8192 else 216


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def supports_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether SplitK, or SkinnyGemm on Hopper, runs on the device with this dtype."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return capable(torch.cuda.get_device_capability(device), dtype)


def capable(capability: tuple[int, int], dtype: torch.dtype) -> bool:
    """As supports_kernels, of any GPU of this compute capability (major, minor)."""
    return capability >= (8, 0) and dtype in (torch.bfloat16, torch.float16)
