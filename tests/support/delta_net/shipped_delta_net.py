"""Calls of the gated delta net's kernels as they are shipped, on tensors of no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from model_zoo.layers.delta_net.chunk_plan import plan_chunks
from model_zoo.layers.delta_net.decode.kernel import delta_net_decode
from model_zoo.layers.delta_net.decode.one_token import decode_one_token
from model_zoo.layers.delta_net.inputs import (
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
    Snapshots,
)
from model_zoo.layers.delta_net.prompts import delta_net_prompts, prompt_tiles
from tests.support.kernels.shipped_attention import BF16, FP32, INT32, tensor

KEY_HEADS, DIM, ROWS, SLOTS = 16, 128, 64, 80


def arguments(
    value_heads: int,
    state_dtype: torch.dtype,
    tokens: int,
    max_tokens: int,
    snapshots: bool,
    dtype: torch.dtype = BF16,
    dim: int = DIM,
    token_by_token: bool = False,
) -> tuple:
    """The arguments of gated_delta_net for a layer of Qwen3.5."""
    widths = [2 * KEY_HEADS * dim + value_heads * dim, value_heads * dim, value_heads, value_heads]
    wide = tensor(tokens, sum(widths), dtype=dtype)
    conv_dim = widths[0]
    weights = DeltaNetWeights(
        conv=tensor(4, conv_dim, dtype=dtype).T,
        a_log=tensor(value_heads, dtype=FP32),
        dt_bias=tensor(value_heads),
        norm=tensor(dim),
        norm_eps=1e-6,
    )
    state = DeltaNetState(
        tensor(SLOTS, 4, conv_dim, dtype=dtype),
        tensor(SLOTS, value_heads, dim, dim, dtype=state_dtype),
    )
    rows = DeltaNetRows(
        cu_seqlens=tensor(ROWS + 1, dtype=INT32),
        cache_seqlens=tensor(ROWS, dtype=INT32),
        slots=tensor(ROWS, dtype=INT32),
        max_tokens=max_tokens,
        snapshots=Snapshots(tensor(ROWS, dtype=INT32), tensor(ROWS, 1, dtype=INT32))
        if snapshots
        else None,
        token_by_token=token_by_token,
    )
    return (*wide.split(widths, 1), weights, state, rows)


def call_decode(
    value_heads: int,
    state_dtype: torch.dtype,
    max_tokens: int,
    snapshots: bool = False,
    token_by_token: bool = False,
) -> None:
    tokens = ROWS * max_tokens
    made = arguments(
        value_heads, state_dtype, tokens, max_tokens, snapshots, token_by_token=token_by_token
    )
    delta_net_decode(*made, tensor(tokens, value_heads * DIM))


def call_one_token(value_heads: int, state_dtype: torch.dtype) -> None:
    made = arguments(value_heads, state_dtype, ROWS, 1, snapshots=False)
    decode_one_token(*made, tensor(ROWS, value_heads * DIM))


def call_prompts(
    value_heads: int,
    state_dtype: torch.dtype,
    dtype: torch.dtype = BF16,
    dim: int = DIM,
    snapshots: bool = True,
    hopper: bool = False,
) -> None:
    """snapshots: as in all steps with prompts of a server; hopper: by the Hopper kernels."""
    tokens = 8192
    made = arguments(value_heads, state_dtype, tokens, tokens, snapshots, dtype, dim)
    plan = plan_chunks(made[-1].cu_seqlens, made[-1].cache_seqlens, tokens)
    tiles = replace(prompt_tiles(dtype), local_hopper=hopper, scan_hopper=hopper)
    delta_net_prompts(*made, plan, tensor(tokens, value_heads * dim, dtype=dtype), tiles)


DELTA_NET: dict[str, Callable[[], None]] = {}
for value_heads in (32, 48):
    for dtype, state in ((FP32, "fp32"), (BF16, "bf16")):
        for max_tokens in (1, 4):
            name = f"delta_net_decode {value_heads} {state} at {max_tokens}"
            DELTA_NET[name] = partial(call_decode, value_heads, dtype, max_tokens)
        name = f"decode_one_token {value_heads} {state}"
        DELTA_NET[name] = partial(call_one_token, value_heads, dtype)
DELTA_NET["delta_net_decode 48 fp32 snapshots"] = partial(call_decode, 48, FP32, 4, True)
DELTA_NET["delta_net_decode 48 fp32 token by token"] = partial(
    call_decode, 48, FP32, 64, True, True
)
for value_heads in (32, 48):
    for dtype, state in ((FP32, "fp32"), (BF16, "bf16")):
        name = f"delta_net_prompts {value_heads} {state}"
        DELTA_NET[name] = partial(call_prompts, value_heads, dtype)
DELTA_NET["delta_net_prompts 48 fp32 without snapshots"] = partial(
    call_prompts, 48, FP32, snapshots=False
)
for dim in (16, 32):
    name = f"delta_net_prompts of {dim}"
    DELTA_NET[name] = partial(call_prompts, 32, FP32, BF16, dim)
DELTA_NET["delta_net_prompts in fp32"] = partial(call_prompts, 32, FP32, FP32)
DELTA_NET["delta_net_prompts of 16 in fp32"] = partial(call_prompts, 32, FP32, FP32, 16)

HOPPER_DELTA_NET: dict[str, Callable[[], None]] = {}
for value_heads in (32, 48, 64):
    for snapshots in (False, True):
        name = f"{value_heads}" + " with snapshots" * snapshots
        HOPPER_DELTA_NET[f"delta_net_prompts by hopper {name}"] = partial(
            call_prompts, value_heads, FP32, snapshots=snapshots, hopper=True
        )
