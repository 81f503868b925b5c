"""Calls of every kernel as it is shipped, on tensors of no device: for compile_for_hopper.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.add_rms_norm_quantize import all_reduce_add_rms_norm_quantize
from model_zoo.layers.all_reduce.symmetric_buffers import (
    RankSum,
    SymmetricBuffers,
    buffer_shape,
)
from model_zoo.layers.gemm.batch_invariant_kernel import BatchInvariantGemm
from model_zoo.layers.gemm.candidates import gemm_candidates
from model_zoo.layers.gemm.implementations import BUCKETS, CublasGemm, SkinnyGemm, SplitK
from model_zoo.layers.gemm.sending import SendingGemm
from model_zoo.layers.gemm.swiglu import SwigluGemm
from model_zoo.layers.kernels.add_rms_norm import add_rms_norm, norm_of_sum
from model_zoo.layers.kernels.embed import embed
from model_zoo.layers.kernels.hold import hold
from model_zoo.layers.kernels.qk_norm_rope_write import qk_norm_rope_write
from model_zoo.layers.kernels.sigmoid_mul import sigmoid_mul
from model_zoo.layers.kernels.silu_mul import gelu_tanh_mul, silu_mul
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.quantized_rows import ScaleKind
from model_zoo.vision.rotate_qk import rotate_qk
from runtime.cuda_graph.prepare import prepare
from runtime.sampling.banned import WINDOW, BannedTable
from runtime.sampling.kernels.apply_masks import add_bias, apply_masks, ban
from runtime.sampling.kernels.logprobs import ScoredRows, score
from runtime.sampling.kernels.sample import sample
from runtime.sampling.logprobs import LogprobsTensors
from runtime.sampling.state import ROW_WORDS, SamplerState
from tests.support.kernels.shipped_attention import (
    ATTENTION,
    BF16,
    FP32,
    GROUP,
    INT32,
    KV_HEADS,
    META,
    ROWS,
    TENSORS,
    TOKENS,
    ShippedStep,
    tensor,
)


def call_qk_norm_rope_write(
    head_dim: int, kv_dtype: torch.dtype, tokens: int, rotated: int | None = None
) -> None:
    step, heads = ShippedStep(head_dim, kv_dtype), KV_HEADS * GROUP
    weight = tensor(head_dim)
    qk_norm_rope_write(
        tensor(tokens, (heads + 2 * KV_HEADS) * head_dim),
        step.k,
        step.k,
        tensor(tokens, dtype=torch.int64),
        heads=heads,
        cos_sin=tensor(tokens, rotated or head_dim),
        q_weight=weight,
        k_weight=weight,
        **step.scales,
    )


def call_gated_qk_norm_rope_write(tokens: int) -> None:
    """Of Qwen3.5-27B: a gate after each query, and a quarter of a head rotated."""
    step, weight = ShippedStep(256, BF16), tensor(256)
    qk_norm_rope_write(
        tensor(tokens, (2 * 24 + 2 * step.k.shape[1]) * 256),
        step.k,
        step.k,
        tensor(tokens, dtype=torch.int64),
        heads=24,
        gated=True,
        cos_sin=tensor(tokens, 64),
        q_weight=weight,
        k_weight=weight,
        plus_one=True,
        **step.scales,
    )


def call_sigmoid_mul(tokens: int) -> None:
    gates = tensor(tokens, 24, 512)[..., 256:]
    sigmoid_mul(tensor(tokens, 24, 256), gates)


def call_add_norm(tokens: int) -> None:
    x = tensor(tokens, 4096)
    add_rms_norm(x, x, tensor(4096), 1e-6)


def call_norms_around_the_sum(tokens: int) -> None:
    x, weight = tensor(tokens, 3840), tensor(3840)
    add_rms_norm(x, x, weight, 1e-6, post_weight=weight, plus_one=True)


def call_norm(tokens: int) -> None:
    norm_of_sum(tensor(tokens, 4096), tensor(4096), 1e-6)


def buffers_of(world: int) -> SymmetricBuffers:
    return SymmetricBuffers(
        memories=(tensor(*buffer_shape(TOKENS, 4096, world)),) * world,
        addresses=(1 << 40,) * world,
        limit=tensor(2, dtype=INT32),
        rank=1,
        programs=264,
    )


def call_all_reduce_add_norm(
    world: int, kind: ScaleKind | None = None, *, two_norms: bool = False, is_sent: bool = False
) -> None:
    buffers = buffers_of(world)
    x, weight = tensor(TOKENS, 4096), tensor(4096)
    options = {"post_weight": weight if two_norms else None, "is_sent": is_sent}
    if kind is None:
        all_reduce_add_rms_norm(buffers, 1, x, x, weight, 1e-6, **options)
    else:
        all_reduce_add_rms_norm_quantize(buffers, 1, x, x, weight, 1e-6, kind, **options)


def call_swiglu(dtype: torch.dtype) -> None:
    SwigluGemm().run(tensor(TOKENS, 4096, dtype=dtype), tensor(2 * 12_288, 4096, dtype=dtype), None)


def call_sending(outs: int, dtype: torch.dtype, gemm: SendingGemm) -> None:
    """The down projection of Qwen3-8B on one of two GPUs."""
    gemm.run_into(
        tensor(TOKENS, 6144, dtype=dtype),
        tensor(4096, 6144, dtype=dtype),
        [tensor(TOKENS, 4096, dtype=dtype)] * outs,
    )


def call_silu(tokens: int) -> None:
    silu_mul(tensor(tokens, 2 * 12_288))


def call_gelu(tokens: int) -> None:
    gelu_tanh_mul(tensor(tokens, 2 * 15_360))


def call_embed(tokens: int) -> None:
    ids = tensor(tokens, dtype=torch.int64)
    embed(ids, ids, tensor(1000, 4096), tensor(4096), 1e-6, [(tensor(64, dtype=FP32), 1.0)])


def call_embed_scaled(tokens: int) -> None:
    ids, frequencies = tensor(tokens, dtype=torch.int64), tensor(128, dtype=FP32)
    ropes = [(frequencies, 1.0), (frequencies, 1.0)]
    embed(
        ids, ids, tensor(1000, 3840), tensor(3840), 1e-6, ropes, embedding_scale=62.0, plus_one=True
    )


def call_prepare() -> None:
    ids, tables = tensor(TOKENS, dtype=torch.int64), tensor(1, 256, 2048, dtype=INT32)
    prepare(
        tensor(9000, dtype=INT32),
        tables,
        ids,
        tensor(256, 24, dtype=INT32),
        stride=264,
        new_rows_at=2376,
        num_new_rows=16,
        tokens_at=3000,
        pages_at=5000,
        tokens=ids,
        positions=ids,
        slot_mappings=tensor(1, TOKENS, dtype=torch.int64),
        logit_rows=tensor(256, dtype=torch.int64),
        row_pages=tables,
        page_size=16,
    )


def call_gemm(gemm: SkinnyGemm | SplitK, rows: int) -> None:
    gemm.run(tensor(rows, 4096), tensor(6144, 4096), tensor(6144))


def call_add_to(gemm: SkinnyGemm, rows: int, world: int) -> None:
    residual, rank_sum = tensor(rows, 4096), RankSum(buffers_of(world), 1)
    norm = RMSNorm(0, 1e-6, BF16)
    norm.weight = torch.nn.Parameter(tensor(4096))
    weight = tensor(4096, 4096)
    gemm.add_to(residual, tensor(rows, 4096), weight, None, norm, rank_sum=rank_sum)


def call_gated(gemm: SkinnyGemm, rows: int) -> None:
    gemm.multiply(tensor(rows, 4096), tensor(6144, 4096), tensor(6144), "silu")


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


def call_rotate_qk(head_dim: int) -> None:
    rotate_qk(tensor(4096, 3, 16, head_dim), tensor(4096, head_dim, dtype=FP32))


SHIPPED: dict[str, Callable[[], None]] = {
    **ATTENTION,
    "rotate_qk of 64": partial(call_rotate_qk, 64),
    "rotate_qk of 72": partial(call_rotate_qk, 72),
    "hold": partial(hold, META, 4000),
    "prepare": call_prepare,
    "swiglu bf16": partial(call_swiglu, BF16),
    "swiglu fp16": partial(call_swiglu, torch.float16),
    "sending to 1 bf16": partial(call_sending, 1, BF16, SendingGemm()),
    "sending to 2 bf16": partial(call_sending, 2, BF16, SendingGemm()),
    "sending to 2 bf16 in large pieces": partial(call_sending, 2, BF16, SendingGemm(piece_rows=64)),
    "sending to 2 fp16": partial(call_sending, 2, torch.float16, SendingGemm()),
    "sending to 8 bf16": partial(call_sending, 8, BF16, SendingGemm()),
    "sending at once to 1 bf16": partial(call_sending, 1, BF16, SendingGemm(paced=False)),
    "sending at once to 2 bf16": partial(call_sending, 2, BF16, SendingGemm(paced=False)),
    "sending at once to 2 fp16": partial(call_sending, 2, torch.float16, SendingGemm(paced=False)),
    "sending at once to 8 bf16": partial(call_sending, 8, BF16, SendingGemm(paced=False)),
    "sample bf16": partial(call_sample, BF16),
    "sample fp32": partial(call_sample, FP32),
    "constrained bf16": partial(call_constrained, BF16),
    "constrained fp32": partial(call_constrained, FP32),
}
for tokens in (1, TOKENS):
    SHIPPED[f"add_norm at {tokens}"] = partial(call_add_norm, tokens)
    SHIPPED[f"norms_around_sum at {tokens}"] = partial(call_norms_around_the_sum, tokens)
    SHIPPED[f"gelu_tanh_mul at {tokens}"] = partial(call_gelu, tokens)
    SHIPPED[f"embed scaled at {tokens}"] = partial(call_embed_scaled, tokens)
    SHIPPED[f"norm at {tokens}"] = partial(call_norm, tokens)
    SHIPPED[f"qk_norm_rope_write gated at {tokens}"] = partial(
        call_gated_qk_norm_rope_write, tokens
    )
    SHIPPED[f"sigmoid_mul at {tokens}"] = partial(call_sigmoid_mul, tokens)
    SHIPPED[f"silu_mul at {tokens}"] = partial(call_silu, tokens)
    SHIPPED[f"embed at {tokens}"] = partial(call_embed, tokens)
for rows in BUCKETS[1:]:
    for gemm in {*gemm_candidates(132, (9, 0), rows, 6144, 4096), SplitK(64, 128, 2)}:
        if not isinstance(gemm, CublasGemm):
            name = f"{type(gemm).__name__} {gemm.block_n} x {gemm.block_k} at {rows}"
            SHIPPED[name] = partial(call_gemm, gemm, rows)
        if isinstance(gemm, SkinnyGemm):
            SHIPPED[f"{name}, gated"] = partial(call_gated, gemm, rows)
            if gemm.adds_ranks(rows):
                SHIPPED[f"{name}, added over ranks"] = partial(call_add_to, gemm, rows, 2)
for rows in (16, 128, 512, 4096):
    SHIPPED[f"batch_invariant_gemm at {rows}"] = partial(call_batch_invariant_gemm, rows)
for name, (head_dim, kv_dtype) in TENSORS.items():
    for tokens in (1, TOKENS):
        SHIPPED[f"qk_norm_rope_write {name} at {tokens}"] = partial(
            call_qk_norm_rope_write, head_dim, kv_dtype, tokens
        )
for tokens in (1, TOKENS):
    SHIPPED[f"qk_norm_rope_write half rotated at {tokens}"] = partial(
        call_qk_norm_rope_write, 128, BF16, tokens, 64
    )
for world in (2, 4):
    SHIPPED[f"all_reduce_add_norm over {world}"] = partial(call_all_reduce_add_norm, world)
SHIPPED["all_reduce_add_norm of what is sent"] = partial(call_all_reduce_add_norm, 2, is_sent=True)
SHIPPED["all_reduce_add_norm_quantize over 2"] = partial(call_all_reduce_add_norm, 2, "block")
for world in (4, 8):
    SHIPPED[f"all_reduce_two_norms_quantize over {world}"] = partial(
        call_all_reduce_add_norm, world, "block", two_norms=True
    )
