"""PlannedKernel: a kernel of the table, how to call it, and what its plans must be made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attention.backend import Shape
from attention.planner.costs import device_costs
from attention.planner.prefill_tiles import TilePlan, TileSpec
from attention.planner.split_plan import SplitPlan, SplitPlanSpec

# Programs an SM of the Hopper decode kernel in steps that only decode, from so many rows on: what
# one waits for at the end of a piece, the other hides.  On an H100, steps of 128 and 256 rows of an
# 8B model take 5 % less, 8 rows of 8,000 tokens 4 % less, of 1,100 tokens 0.6 % more.  Beside
# prompts they gain nothing, and take the prompts' room; with one KV head, few rows lose up to 13 %.
DECODE_CTAS_PER_SM, DECODE_CTAS_ROWS = 2, 8
DECODE_CTAS_REGISTERS = 128  # a thread: of more, an SM has too few for two programs
# Programs an SM of the plain decode kernel where there are few KV heads.  On an H100, with one KV
# head and rows of different lengths, a third costs plans of `uneven` up to 20 %; with 8 it gains 2
# to 5 %.
FEW_HEADS, FEW_HEADS_CTAS_PER_SM = 2, 2
INTERPRETED_SMS = 4  # of the interpreter, which runs one program after the other


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    name: str  # as in the table
    run: Callable[..., None]  # (q, k, v, page_table, plan or tiles, out, lse, *, scale, ...)
    block_m: int  # packed query rows of a tile
    block_n: int  # KV positions
    ctas_per_sm: int  # programs an SM
    decode_ctas_per_sm: int = 0  # the same, in steps of more rows that all decode; 0: no difference

    def programs(self, rows: int, *, prompts: bool) -> int:
        """An SM's, in steps of so many rows, of which some may feed prompts."""
        decode_ctas_per_sm = self.decode_ctas_per_sm and rows >= DECODE_CTAS_ROWS and not prompts
        return self.decode_ctas_per_sm if decode_ctas_per_sm else self.ctas_per_sm


def decode_kernel(name: str, shape: Shape, max_q_len: int) -> PlannedKernel:
    """The table's kernel for rows that feed at most max_q_len tokens."""
    queries = shape.group * max_q_len
    if name == "decode_hopper":
        from attention.decode.decode_hopper import decode_hopper, hopper_decode_config

        config = hopper_decode_config(shape.head_dim, queries, shape.kv_dtype.itemsize)
        small = config.registers <= DECODE_CTAS_REGISTERS and shape.kv_dtype.itemsize > 1
        decode_ctas_per_sm = DECODE_CTAS_PER_SM if small and shape.kv_heads > FEW_HEADS else 0
        return PlannedKernel(name, decode_hopper, queries, config.block_n, 1, decode_ctas_per_sm)
    from attention.decode.decode import decode, decode_config

    config = decode_config(shape.head_dim, shape.dtype, queries, shape.kv_dtype)
    most = FEW_HEADS_CTAS_PER_SM if shape.kv_heads <= FEW_HEADS else config.ctas_per_sm
    return PlannedKernel(name, decode, queries, config.block_n, min(config.ctas_per_sm, most))


def decode_spec(
    kernel: PlannedKernel,
    shape: Shape,
    device: torch.device,
    window: int,
    max_q_len: int,
    ctas_per_sm: int,
) -> SplitPlanSpec:
    """What a plan for the kernel depends on; raises ValueError for a damaged file of costs.

    resident: programs an SM, `resident` or `crowded` of the kernel
    """
    return device_costs(_name(device), kernel.name).spec(
        kv_heads=shape.kv_heads,
        programs=multiprocessors(device) * ctas_per_sm,
        group=shape.group,
        head_dim=shape.head_dim,
        item_bytes=shape.kv_dtype.itemsize,
        block=kernel.block_n,
        max_q_len=max_q_len,
        window=window,
    )


def prefill_kernel(name: str, shape: Shape) -> PlannedKernel:
    """The table's kernel for prompts."""
    if name == "prefill_hopper":
        from attention.prefill.prefill_hopper import hopper_config, prefill_hopper

        return PlannedKernel(name, prefill_hopper, 128, hopper_config(shape.head_dim).block_n, 1)
    from attention.prefill.prefill import prefill, prefill_config

    config = prefill_config(shape.head_dim, shape.dtype)
    return PlannedKernel(name, prefill, config.block_m, config.block_n, config.ctas_per_sm)


def mixed_kernel(decode: PlannedKernel, prefill: PlannedKernel) -> Callable[..., None] | None:
    """Both in one call (q, k, v, page_table, plan, tiles, out, lse, *, scale, ...), or None.

    For Hopper: the prompts' programs begin on the SMs where those of rows that decode have ended,
    while others of these still read; the combine of the latter comes last.
    """
    if (decode.name, prefill.name) != ("decode_hopper", "prefill_hopper"):
        return None

    def run(
        q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, plan: SplitPlan, tiles: TilePlan,
        out: Tensor, lse: Tensor | None = None, **features: Any,
    ) -> None:  # fmt: skip
        def prompts() -> None:
            prefill.run(q, k, v, page_table, tiles, out, lse, overlap=True, **features)

        decode.run(q, k, v, page_table, plan, out, lse, overlap=prompts, **features)

    return run


def tile_spec(
    kernel: PlannedKernel, shape: Shape, device: torch.device, window: int, max_q_len: int
) -> TileSpec:
    """What a tile plan for the kernel depends on; rows of at most max_q_len tokens are left out."""
    return TileSpec(
        kv_heads=shape.kv_heads,
        group=shape.group,
        programs=multiprocessors(device) * kernel.ctas_per_sm,
        min_q_len=max_q_len + 1,
        window=window,
        block_m=kernel.block_m,
        block_n=kernel.block_n,
    )


def _name(device: torch.device) -> str:
    """As costs are kept by."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def multiprocessors(device: torch.device) -> int:
    """How many; of the interpreter a few."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
