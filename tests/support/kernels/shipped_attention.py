"""Calls of the attention kernels and planners as they are shipped, on tensors of no device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attention.backend import BackendChoice, Capacity, Shape
from attention.batch_invariant.kernel import batch_invariant_attention, batch_invariant_config
from attention.batch_invariant.plan import BatchInvariantSpec
from attention.batch_invariant.plan_device import BatchInvariantPlanner
from attention.common.flash1 import flash1
from attention.common.kernel_inputs import KernelInputs
from attention.common.write_kv import write_kv
from attention.decode.decode import decode
from attention.decode.decode_hopper import decode_hopper
from attention.dispatch import build
from attention.encoder.seqlens import Seqlens
from attention.encoder.varlen import varlen
from attention.encoder.varlen_hopper import varlen_hopper
from attention.encoder.varlen_hopper_config import (
    THREE_CONSUMERS,
    TWO_CONSUMERS,
    VarlenHopperConfig,
)
from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from attention.planner.device_planner import DevicePlanner
from attention.planner.prefill_tiles import TilePlan, TileSpec
from attention.planner.prefill_tiles_device import DeviceTiler
from attention.planner.split_plan import SplitPlan, SplitPlanSpec
from attention.prefill.prefill import prefill, prefill_config
from attention.prefill.prefill_hopper import HALF, hopper_config, prefill_hopper

META = torch.device("meta")
BF16, FP8, FP32, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
PAGES, PAGE, KV_HEADS, GROUP, ROWS, TOKENS = 4096, 16, 8, 4, 64, 2048


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class ShippedStep:
    """The tensors of a step of Llama 3's heads: 32 of queries, 8 of keys and values."""

    def __init__(self, head_dim: int, kv_dtype: torch.dtype, group: int = GROUP) -> None:
        self.q = tensor(TOKENS, KV_HEADS * group, head_dim)
        self.out, self.lse = torch.empty_like(self.q), tensor(TOKENS, KV_HEADS * group, dtype=FP32)
        self.k = tensor(PAGES, KV_HEADS, PAGE, head_dim, dtype=kv_dtype)
        self.table = tensor(ROWS, 512, dtype=INT32)
        scales = tensor(KV_HEADS, dtype=FP32) if kv_dtype == FP8 else None
        self.scales = {"k_scale": scales, "v_scale": scales}
        self.inputs = KernelInputs(
            self.q, self.k, self.k, self.table, self.out, self.lse,
            scale=head_dim**-0.5, k_scale=scales, v_scale=scales,
        )  # fmt: skip


def split_plan(head_dim: int, programs: int, group: int = GROUP, row_tokens: int = 1) -> SplitPlan:
    return SplitPlan.allocate(
        SplitPlanSpec(kv_heads=KV_HEADS, programs=programs, max_q_len=row_tokens),
        max_rows=ROWS,
        group=group,
        head_dim=head_dim,
        queued=False,
        device=META,
    )


def call_decode(head_dim: int, kv_dtype: torch.dtype) -> None:
    step, plan = ShippedStep(head_dim, kv_dtype), split_plan(head_dim, 264)
    decode(step.inputs, plan)


def call_decode_hopper(
    head_dim: int,
    kv_dtype: torch.dtype,
    group: int = GROUP,
    row_tokens: int = 1,
    overlap: Callable[[], None] | None = None,
) -> None:
    step = ShippedStep(head_dim, kv_dtype, group)
    plan = split_plan(head_dim, 132, group, row_tokens)
    decode_hopper(step.inputs, plan, overlap=overlap)


def call_flash2(head_dim: int, kv_dtype: torch.dtype, q_len: int) -> None:
    """A step of rows of this many tokens, through the back end."""
    step = ShippedStep(head_dim, kv_dtype)
    shape = Shape(
        heads=KV_HEADS * GROUP,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        page_size=PAGE,
        dtype=BF16,
        kv_dtype=kv_dtype,
    )
    choice = BackendChoice("flash2", "decode_hopper", "prefill", "stream-k")
    backend = build(choice, shape, Capacity(rows=ROWS, tokens=TOKENS, row_tokens=4), META)
    pages, scales = step.k[None], (None if s is None else s[None] for s in step.scales.values())
    kv = KVPool(pages, pages, *scales)
    meta = AttentionMetadata(
        cu_seqlens_q=tensor(ROWS + 1, dtype=INT32),
        cache_seqlens=tensor(ROWS, dtype=INT32),
        page_tables=(step.table,),
        slot_mappings=(tensor(TOKENS, dtype=torch.int64),),
        max_seqlen_q=q_len,
        decode_rows=ROWS if q_len == 1 else 0,
        q_lens=(q_len,) * ROWS,
        kv_lens=(0,) * ROWS,
    )
    backend.attend(
        step.q, kv.layers[0], backend.plan(meta, kv), scale=step.inputs.scale, lse=step.inputs.lse
    )


def tile_spec(block_m: int, block_n: int, ctas_per_sm: int = 1) -> TileSpec:
    return TileSpec(
        kv_heads=KV_HEADS,
        group=GROUP,
        programs=132 * ctas_per_sm,
        block_m=block_m,
        block_n=block_n,
    )


def tile_plan(spec: TileSpec, head_dim: int) -> TilePlan:
    return TilePlan.allocate(spec, max_tokens=TOKENS, max_rows=ROWS, head_dim=head_dim, device=META)


def call_prefill(head_dim: int, kv_dtype: torch.dtype) -> None:
    step, config = ShippedStep(head_dim, kv_dtype), prefill_config(head_dim, BF16)
    tiles = tile_plan(tile_spec(config.block_m, config.block_n, config.ctas_per_sm), head_dim)
    prefill(step.inputs, tiles)


def call_prefill_hopper(head_dim: int, kv_dtype: torch.dtype) -> None:
    step, config = ShippedStep(head_dim, kv_dtype), hopper_config(head_dim, kv_dtype)
    tiles = tile_plan(tile_spec(2 * HALF.value, config.block_n), head_dim)
    prefill_hopper(step.inputs, tiles)


def call_flash1(head_dim: int, kv_dtype: torch.dtype) -> None:
    step = ShippedStep(head_dim, kv_dtype)
    cu_seqlens_q, cache_seqlens = tensor(ROWS + 1, dtype=INT32), tensor(ROWS, dtype=INT32)
    flash1(step.inputs, cu_seqlens_q, cache_seqlens)


def call_batch_invariant(head_dim: int, kv_dtype: torch.dtype) -> None:
    step, config = ShippedStep(head_dim, kv_dtype), batch_invariant_config(head_dim, BF16)
    spec = BatchInvariantSpec(
        kv_heads=KV_HEADS,
        group=GROUP,
        programs=132 * config.ctas_per_sm,
        block_m=config.block_m,
        split=config.split,
    )
    planner = BatchInvariantPlanner(
        spec, max_tokens=TOKENS, max_rows=256, head_dim=head_dim, device=META
    )
    plan = planner.plan(tensor(257, dtype=INT32), tensor(256, dtype=INT32))
    batch_invariant_attention(step.inputs, plan)


def call_varlen(head_dim: int, dtype: torch.dtype) -> None:
    """An image of 1024 x 1024 pixels."""
    varlen(tensor(4096, 3, 16, head_dim, dtype=dtype), Seqlens((4096,), tensor(2, dtype=INT32)))


def call_varlen_hopper(head_dim: int, config: VarlenHopperConfig) -> None:
    seqlens = Seqlens((4096,), tensor(2, dtype=INT32))
    varlen_hopper(tensor(4096, 3, 16, head_dim), seqlens, config=config)


def call_write_kv(head_dim: int, kv_dtype: torch.dtype) -> None:
    step = ShippedStep(head_dim, kv_dtype)
    new = tensor(TOKENS, KV_HEADS, head_dim)
    write_kv(new, new, step.k, step.k, tensor(TOKENS, dtype=torch.int64), **step.scales)


def call_planner() -> None:
    planner = DevicePlanner(
        SplitPlanSpec(kv_heads=KV_HEADS, programs=132),
        "stream-k",
        max_rows=256,
        group=GROUP,
        head_dim=128,
        device=META,
    )
    planner.plan(tensor(257, dtype=INT32), tensor(256, dtype=INT32))


def call_tiler() -> None:
    tiler = DeviceTiler(
        tile_spec(128, 128), max_tokens=TOKENS, max_rows=256, head_dim=128, device=META
    )
    tiler.plan(tensor(257, dtype=INT32), tensor(256, dtype=INT32))


ATTENTION: dict[str, Callable[[], None]] = {"planner": call_planner, "tiler": call_tiler}
TENSORS = {"d128 bf16": (128, BF16), "d64 bf16": (64, BF16), "d128 fp8": (128, FP8)}
for name, (head_dim, kv_dtype) in TENSORS.items():
    ATTENTION[f"decode {name}"] = partial(call_decode, head_dim, kv_dtype)
    ATTENTION[f"prefill {name}"] = partial(call_prefill, head_dim, kv_dtype)
    ATTENTION[f"flash1 {name}"] = partial(call_flash1, head_dim, kv_dtype)
    ATTENTION[f"batch_invariant {name}"] = partial(call_batch_invariant, head_dim, kv_dtype)
    ATTENTION[f"write_kv {name}"] = partial(call_write_kv, head_dim, kv_dtype)
    ATTENTION[f"decode_hopper {name}"] = partial(call_decode_hopper, head_dim, kv_dtype)
    ATTENTION[f"decode_hopper {name}, beside a prompt"] = partial(
        call_decode_hopper, head_dim, kv_dtype, overlap=lambda: None
    )
    ATTENTION[f"flash2 {name}"] = partial(call_flash2, head_dim, kv_dtype, 1)
    for group, tokens in ((4, 4), (4, 8), (8, 8)):
        ATTENTION[f"decode_hopper {name}, {tokens} tokens of {group}"] = partial(
            call_decode_hopper, head_dim, kv_dtype, group, tokens
        )
    ATTENTION[f"prefill_hopper {name}"] = partial(call_prefill_hopper, head_dim, kv_dtype)
ATTENTION["prefill_hopper d256 bf16"] = partial(call_prefill_hopper, 256, BF16)
ATTENTION["prefill_hopper d256 fp8"] = partial(call_prefill_hopper, 256, FP8)
for head_dim in (64, 72, 80):
    ATTENTION[f"varlen_hopper d{head_dim} bf16"] = partial(
        call_varlen_hopper, head_dim, TWO_CONSUMERS
    )
ATTENTION["varlen_hopper d72 bf16 of three"] = partial(call_varlen_hopper, 72, THREE_CONSUMERS)
ATTENTION["varlen d72 fp32"] = partial(call_varlen, 72, FP32)
