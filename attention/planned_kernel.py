"""PlannedKernel: a kernel of dispatch.py's table, and the grid and tile sizes of its plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from attention.backend import Shape
from attention.common.kernel_inputs import KernelInputs
from attention.decode.decode_hopper_config import hopper_decode_config
from attention.planner.costs import device_costs
from attention.planner.prefill_tiles import TilePlan, TileSpec
from attention.planner.split_plan import SplitPlan, SplitPlanSpec

# Steps of so many rows run two CTAs of the Hopper decode kernel per SM: one computes while the
# other waits for the end of its work tile, or of a chain of conversions and products.  A step with
# prompts has room for more rows than that.  With float8 pages, steps of an 8B model with 128 and
# 256 rows take 18 to 22 % less on an H200 (H100: 4 to 6 %), 6 to 10 % less with a prompt beside
# them (2 to 5 %), and with 16 bits 2.5 to 3 % less with a prompt (1 to 3 %).  Fewer than 8 rows
# gain or lose up to 3 %; with one KV head, few rows lose up to 13 %.
TWO_CTAS_ROWS = 8
TWO_CTAS_REGISTERS = 128  # per thread: with more, two CTAs do not fit on an SM
# CTAs per SM of the plain decode kernel with few KV heads.  On an H100, with one KV head and rows
# of different lengths, a third CTA costs stream-K plans up to 20 %; with 8 heads it gains 2 to 5 %.
FEW_HEADS, FEW_HEADS_CTAS_PER_SM = 2, 2
MMA_ROWS = 16  # of a matrix multiplication instruction, and so of the smallest tile
INTERPRETED_SMS = 4  # assumed for the interpreter, which runs programs one after the other


@dataclass(frozen=True, slots=True)
class PlannedKernel:
    name: str  # as in dispatch.py's table
    run: Callable[..., None]  # (KernelInputs, plan)
    block_m: int  # packed query rows of a tile
    block_n: int  # KV positions
    ctas_per_sm: int
    has_two_ctas: bool = False  # per SM, in steps of TWO_CTAS_ROWS or more

    def step_ctas_per_sm(self, rows: int) -> int:
        """CTAs per SM in a step of so many rows."""
        return 2 if self.has_two_ctas and rows >= TWO_CTAS_ROWS else self.ctas_per_sm

    @property
    def grids(self) -> set[int]:
        """The CTAs per SM that its steps may have."""
        return {self.ctas_per_sm, self.step_ctas_per_sm(TWO_CTAS_ROWS)}


def most_decode_tokens(name: str, shape: Shape, row_tokens: int) -> int:
    """The largest q_len that this decode kernel serves in steps with several tokens a row.

    row_tokens: of a decode row, at most

    A row's group * q_len packed queries are one tile, whose size the decode rows decide.  Rows of
    prompts that fit into it are served as well: what takes the time is to read the KV, whatever
    part of the tile is real.  Decode rows with more tokens than the largest tile has are prefill.
    """
    if name == "decode_hopper":
        from attention.decode.decode_hopper import most_queries
    else:
        from attention.decode.decode import most_queries
    tile = max(MMA_ROWS, 1 << (shape.group * row_tokens - 1).bit_length())
    return max(min(tile, most_queries(shape.head_dim)) // shape.group, 1)


def decode_kernel(name: str, shape: Shape, max_q_len: int) -> PlannedKernel:
    """The decode kernel of this name, for rows with q_len up to max_q_len."""
    queries = shape.group * max_q_len
    if name == "decode_hopper":
        from attention.decode.decode_hopper import decode_hopper

        return hopper_decode_kernel(decode_hopper, shape, queries)
    from attention.decode.decode import decode, decode_config

    config = decode_config(shape.head_dim, shape.dtype, queries, shape.kv_dtype)
    most = FEW_HEADS_CTAS_PER_SM if shape.kv_heads <= FEW_HEADS else config.ctas_per_sm
    return PlannedKernel(name, decode, queries, config.block_n, min(config.ctas_per_sm, most))


def hopper_decode_kernel(run: Callable[..., None], shape: Shape, queries: int) -> PlannedKernel:
    """decode_hopper's grid and tile for `queries` packed queries a row; `run` launches it."""
    config = hopper_decode_config(shape.head_dim, queries, shape.kv_dtype.itemsize)
    has_two = config.registers <= TWO_CTAS_REGISTERS and shape.kv_heads > FEW_HEADS
    return PlannedKernel("decode_hopper", run, queries, config.block_n, 1, has_two)


def decode_spec(
    kernel: PlannedKernel,
    shape: Shape,
    device: torch.device,
    window: int,
    max_q_len: int,
    ctas_per_sm: int,
) -> SplitPlanSpec:
    """The spec of the kernel's split plans; raises UnsupportedAttention for a damaged file of
    costs.

    ctas_per_sm: of PlannedKernel.step_ctas_per_sm
    """
    return device_costs(_device_name(device), kernel.name).spec(
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
    """The prefill kernel of this name."""
    if name == "prefill_hopper":
        from attention.prefill.prefill_hopper import hopper_config, prefill_hopper

        block_n = hopper_config(shape.head_dim, shape.kv_dtype).block_n
        return PlannedKernel(name, prefill_hopper, 128, block_n, 1)
    from attention.prefill.prefill import prefill, prefill_config

    config = prefill_config(shape.head_dim, shape.dtype)
    return PlannedKernel(name, prefill, config.block_m, config.block_n, config.ctas_per_sm)


def mixed_kernel(decode: PlannedKernel, prefill: PlannedKernel) -> Callable[..., None] | None:
    """Decode and prefill overlapped: (KernelInputs, plan, tiles).

    Hopper only, else None.  Prefill CTAs start on SMs whose decode CTAs have ended while other
    decode CTAs still read; the combine of split rows comes last.
    """
    if (decode.name, prefill.name) != ("decode_hopper", "prefill_hopper"):
        return None

    def run(inputs: KernelInputs, plan: SplitPlan, tiles: TilePlan) -> None:
        decode.run(inputs, plan, overlap=partial(prefill.run, inputs, tiles, overlap=True))

    return run


def tile_spec(
    kernel: PlannedKernel, shape: Shape, device: torch.device, window: int, max_q_len: int
) -> TileSpec:
    """The spec of the kernel's tile plans, which leave out rows with q_len up to max_q_len."""
    return TileSpec(
        kv_heads=shape.kv_heads,
        group=shape.group,
        programs=multiprocessors(device) * kernel.ctas_per_sm,
        min_q_len=max_q_len + 1,
        window=window,
        block_m=kernel.block_m,
        block_n=kernel.block_n,
    )


def _device_name(device: torch.device) -> str:
    """The key of costs.py's tables."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"


def multiprocessors(device: torch.device) -> int:
    """SMs of the device; INTERPRETED_SMS without CUDA."""
    if device.type != "cuda":
        return INTERPRETED_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
