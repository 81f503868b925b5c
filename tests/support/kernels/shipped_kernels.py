"""Calls of every kernel as it is shipped, on tensors of no device: for compile_for_hopper.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attention.batch_invariant.kernel import batch_invariant_attention, batch_invariant_config
from attention.batch_invariant.plan import BatchInvariantSpec
from attention.batch_invariant.plan_device import BatchInvariantPlanner
from attention.common.flash1 import flash1
from attention.common.kernel_inputs import KernelInputs
from attention.common.write_kv import write_kv
from attention.decode.decode import decode
from attention.decode.decode_hopper import decode_hopper
from attention.planner.device_planner import DevicePlanner
from attention.planner.prefill_tiles import TilePlan, TileSpec
from attention.planner.prefill_tiles_device import DeviceTiler
from attention.planner.split_plan import SplitPlan, SplitPlanSpec
from attention.prefill.prefill import prefill, prefill_config
from attention.prefill.prefill_hopper import HALF, hopper_config, prefill_hopper
from model_zoo.layers.gemm.batch_invariant_kernel import BatchInvariantGemm
from model_zoo.layers.gemm.candidates import gemm_candidates
from model_zoo.layers.gemm.implementations import BUCKETS, CublasGemm, SkinnyGemm, SplitK
from model_zoo.layers.gemm.swiglu import SwigluGemm
from model_zoo.layers.kernels.add_rms_norm import add_rms_norm, norm_of_sum
from model_zoo.layers.kernels.embed import embed
from model_zoo.layers.kernels.qk_norm_rope_write import qk_norm_rope_write
from model_zoo.layers.kernels.silu_mul import silu_mul
from runtime.cuda_graph.prepare import prepare
from runtime.sampling.banned import WINDOW, BannedTable
from runtime.sampling.kernels.apply_masks import add_bias, apply_masks, ban
from runtime.sampling.kernels.logprobs import ScoredRows, score
from runtime.sampling.kernels.sample import sample
from runtime.sampling.logprobs import LogprobsTensors
from runtime.sampling.state import ROW_WORDS, SamplerState

META = torch.device("meta")
BF16, FP8, FP32, INT32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32
PAGES, PAGE, KV_HEADS, GROUP, ROWS, TOKENS = 4096, 16, 8, 4, 64, 2048


def tensor(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


class ShippedStep:
    """The tensors of a step of Llama 3's heads: 32 of queries, 8 of keys and values."""

    def __init__(self, head_dim: int, kv_dtype: torch.dtype) -> None:
        self.q = tensor(TOKENS, KV_HEADS * GROUP, head_dim)
        self.out, self.lse = torch.empty_like(self.q), tensor(TOKENS, KV_HEADS * GROUP, dtype=FP32)
        self.k = tensor(PAGES, KV_HEADS, PAGE, head_dim, dtype=kv_dtype)
        self.table = tensor(ROWS, 512, dtype=INT32)
        scales = tensor(KV_HEADS, dtype=FP32) if kv_dtype == FP8 else None
        self.scales = {"k_scale": scales, "v_scale": scales}
        self.inputs = KernelInputs(
            self.q, self.k, self.k, self.table, self.out, self.lse,
            scale=head_dim**-0.5, **self.scales,
        )  # fmt: skip


def split_plan(head_dim: int, programs: int) -> SplitPlan:
    return SplitPlan.allocate(
        SplitPlanSpec(kv_heads=KV_HEADS, programs=programs),
        max_rows=ROWS,
        group=GROUP,
        head_dim=head_dim,
        queued=False,
        device=META,
    )


def call_decode(head_dim: int, kv_dtype: torch.dtype) -> None:
    step, plan = ShippedStep(head_dim, kv_dtype), split_plan(head_dim, 264)
    decode(step.inputs, plan)


def call_decode_hopper(head_dim: int, kv_dtype: torch.dtype) -> None:
    step, plan = ShippedStep(head_dim, kv_dtype), split_plan(head_dim, 132)
    decode_hopper(step.inputs, plan)


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
    step, config = ShippedStep(head_dim, kv_dtype), hopper_config(head_dim)
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


def call_write_kv(head_dim: int, kv_dtype: torch.dtype) -> None:
    step = ShippedStep(head_dim, kv_dtype)
    new = tensor(TOKENS, KV_HEADS, head_dim)
    write_kv(new, new, step.k, step.k, tensor(TOKENS, dtype=torch.int64), **step.scales)


def call_qk_norm_rope_write(head_dim: int, kv_dtype: torch.dtype, tokens: int) -> None:
    step, heads = ShippedStep(head_dim, kv_dtype), KV_HEADS * GROUP
    weight = tensor(head_dim)
    qk_norm_rope_write(
        tensor(tokens, (heads + 2 * KV_HEADS) * head_dim),
        step.k,
        step.k,
        tensor(tokens, dtype=torch.int64),
        heads=heads,
        cos_sin=tensor(tokens, head_dim),
        q_weight=weight,
        k_weight=weight,
        **step.scales,
    )


def call_add_norm(tokens: int) -> None:
    x = tensor(tokens, 4096)
    add_rms_norm(x, x, tensor(4096), 1e-6)


def call_norm(tokens: int) -> None:
    norm_of_sum(tensor(tokens, 4096), tensor(4096), 1e-6)


def call_swiglu(dtype: torch.dtype) -> None:
    SwigluGemm().run(tensor(TOKENS, 4096, dtype=dtype), tensor(2 * 12_288, 4096, dtype=dtype), None)


def call_silu(tokens: int) -> None:
    silu_mul(tensor(tokens, 2 * 12_288))


def call_embed(tokens: int) -> None:
    ids = tensor(tokens, dtype=torch.int64)
    embed(ids, ids, tensor(1000, 4096), tensor(4096), 1e-6, tensor(64, dtype=FP32), 1.0)


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


def call_prepare() -> None:
    ids, table = tensor(TOKENS, dtype=torch.int64), tensor(256, 2048, dtype=INT32)
    prepare(
        tensor(9000, dtype=INT32),
        table,
        ids,
        tensor(256, 24, dtype=INT32),
        stride=264,
        new_rows_at=2376,
        num_new_rows=16,
        tokens_at=3000,
        pages_at=5000,
        tokens=ids,
        positions=ids,
        slot_mapping=ids,
        logit_rows=tensor(256, dtype=torch.int64),
        row_pages=table,
        page_size=16,
    )


def call_gemm(gemm: SkinnyGemm | SplitK, rows: int) -> None:
    gemm.run(tensor(rows, 4096), tensor(6144, 4096), tensor(6144))


def call_batch_invariant_gemm(rows: int) -> None:
    BatchInvariantGemm(132).run(tensor(rows, 4096), tensor(6144, 4096), tensor(6144))


def call_sample(dtype: torch.dtype) -> None:
    vocab = 151936
    state = SamplerState(ROWS, vocab, META)
    state.apply(tensor(ROWS, ROW_WORDS, dtype=INT32))
    numbers = [tensor(ROWS, dtype=INT32) for _ in range(5)]
    slots, positions, last_token, tokens, usable = numbers
    sample(tensor(ROWS, vocab, dtype=dtype), slots, positions, state, last_token, tokens, usable)


def call_constrained(dtype: torch.dtype) -> None:
    logits = tensor(ROWS, 151936, dtype=dtype)
    numbers, words = tensor(ROWS, dtype=INT32), tensor(1 << 20, dtype=INT32)
    aside = tensor(ROWS, 151936, dtype=FP32)
    apply_masks(logits, numbers, numbers, words, aside)
    add_bias(aside, numbers, numbers, numbers)
    ids = tensor(ROWS, 7, dtype=torch.int64)
    ban(aside[0], BannedTable(ids, ids[:, 0]), tensor(WINDOW, dtype=torch.int64))
    others = tensor(ROWS, 20, dtype=torch.int64), tensor(ROWS, 20, dtype=FP32)
    scores = LogprobsTensors(tensor(ROWS, dtype=FP32), tensor(ROWS, dtype=torch.int64), *others)
    score(logits, ScoredRows(*(numbers,) * 5), words, tensor(ROWS, dtype=torch.int64), scores)


SHIPPED: dict[str, Callable[[], None]] = {
    "planner": call_planner,
    "tiler": call_tiler,
    "prepare": call_prepare,
    "swiglu bf16": partial(call_swiglu, BF16),
    "swiglu fp16": partial(call_swiglu, torch.float16),
    "sample bf16": partial(call_sample, BF16),
    "sample fp32": partial(call_sample, FP32),
    "constrained bf16": partial(call_constrained, BF16),
    "constrained fp32": partial(call_constrained, FP32),
}
for tokens in (1, TOKENS):
    SHIPPED[f"add_norm at {tokens}"] = partial(call_add_norm, tokens)
    SHIPPED[f"norm at {tokens}"] = partial(call_norm, tokens)
    SHIPPED[f"silu_mul at {tokens}"] = partial(call_silu, tokens)
    SHIPPED[f"embed at {tokens}"] = partial(call_embed, tokens)
for rows in BUCKETS[1:]:
    for gemm in {*gemm_candidates(132, (9, 0), rows, 6144, 4096), SplitK(64, 128, 2)}:
        if not isinstance(gemm, CublasGemm):
            name = f"{type(gemm).__name__} {gemm.block_n} x {gemm.block_k} at {rows}"
            SHIPPED[name] = partial(call_gemm, gemm, rows)
for rows in (16, 128, 512, 4096):
    SHIPPED[f"batch_invariant_gemm at {rows}"] = partial(call_batch_invariant_gemm, rows)
for head_dim, kv_dtype in ((128, BF16), (64, BF16), (128, FP8)):
    name = f"d{head_dim} {'fp8' if kv_dtype == FP8 else 'bf16'}"
    SHIPPED[f"decode {name}"] = partial(call_decode, head_dim, kv_dtype)
    SHIPPED[f"prefill {name}"] = partial(call_prefill, head_dim, kv_dtype)
    SHIPPED[f"flash1 {name}"] = partial(call_flash1, head_dim, kv_dtype)
    SHIPPED[f"batch_invariant {name}"] = partial(call_batch_invariant, head_dim, kv_dtype)
    SHIPPED[f"write_kv {name}"] = partial(call_write_kv, head_dim, kv_dtype)
    for tokens in (1, TOKENS):
        SHIPPED[f"qk_norm_rope_write {name} at {tokens}"] = partial(
            call_qk_norm_rope_write, head_dim, kv_dtype, tokens
        )
    SHIPPED[f"decode_hopper {name}"] = partial(call_decode_hopper, head_dim, kv_dtype)
    if kv_dtype != FP8:
        SHIPPED[f"prefill_hopper {name}"] = partial(call_prefill_hopper, head_dim, kv_dtype)
