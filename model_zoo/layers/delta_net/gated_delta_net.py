"""gated_delta_net: the layer between its input projections and its output projection."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from model_zoo.layers import fused_kernels
from model_zoo.layers.delta_net.inputs import (
    MAX_CONV_WIDTH,
    MAX_DECODE_TOKENS,
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
)
from model_zoo.layers.delta_net.reference import gated_delta_net_reference
from model_zoo.layers.delta_net.tiles import PromptTiles


def gated_delta_net(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    tiles: PromptTiles | None = None,
) -> Tensor:
    """The mixer of all tokens of a step -> [T, Hv * Dv] of the type of qkv.

    qkv   [T, conv_dim], before the convolution: all queries, all keys, all values
    z     [T, Hv * Dv], the output's gate
    b, a  [T, Hv], of the step size and of the decay
    state the pools, of which the rows' slots are changed in place.  On a GPU a kernel that waits
          before it launches dependents has to be between two calls with the same slots, as there
          is between steps of a model: a state is read before the wait for the kernel before

    Rows of tensors may lie at any stride, so that they may be parts of one projection.  Tokens
    after those of all rows are padding: their output is zero, and they change nothing.
    tiles: of the kernels of prompts; None: what the device and the type take without a trial
    """
    _check(qkv, z, b, a, weights, state, rows)
    if fused_kernels.use_fused_kernels(qkv.device):
        return _by_kernels(qkv, z, b, a, weights, state, rows, tiles)
    return gated_delta_net_reference(qkv, z, b, a, weights, state, rows)


def plan_rows(rows: DeltaNetRows, num_tokens: int) -> DeltaNetRows:
    """The rows with what all layers of a step share: call it once a step, before the first layer.

    num_tokens: of the step, padding included.  On a CPU, and for rows of few tokens, it is nothing.
    """
    if rows.token_by_token or rows.max_tokens <= MAX_DECODE_TOKENS:
        return rows
    if not fused_kernels.use_fused_kernels(rows.slots.device):
        return rows
    from model_zoo.layers.delta_net.chunk_plan import plan_chunks

    return replace(rows, chunks=plan_chunks(rows.cu_seqlens, rows.cache_seqlens, num_tokens))


def _by_kernels(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    tiles: PromptTiles | None,
) -> Tensor:
    """One launch for rows of few tokens; if max_tokens says that there may be others, four more.

    Which kernel has a row depends on its number of tokens, read on the device; but steps whose rows
    times value heads are no more than the multiprocessors have a kernel of their own.
    """
    from model_zoo.layers.delta_net.decode.kernel import delta_net_decode
    from model_zoo.layers.delta_net.decode.one_token import decode_one_token, serves
    from model_zoo.layers.delta_net.prompts import delta_net_prompts

    dims = state.state.shape[2:]
    if any(dim < 16 or dim > 128 or dim & (dim - 1) for dim in dims):
        raise ValueError(
            f"head dimensions {dims[1]} (keys) and {dims[0]} (values) of a gated delta net: a GPU "
            "takes powers of two from 16 to 128, a CPU takes any"
        )
    if weights.conv.shape[1] > MAX_CONV_WIDTH:
        raise ValueError(
            f"a gated delta net's convolution of {weights.conv.shape[1]} tokens "
            f"(linear_conv_kernel_dim): a GPU takes up to {MAX_CONV_WIDTH}, a CPU takes any"
        )
    out = torch.empty(z.shape, dtype=qkv.dtype, device=qkv.device)
    if serves(state, rows):
        decode_one_token(qkv, z, b, a, weights, state, rows, out)
        return out
    has_prompts = rows.max_tokens > MAX_DECODE_TOKENS and not rows.token_by_token
    few = replace(rows, snapshots=None) if has_prompts else rows
    delta_net_decode(qkv, z, b, a, weights, state, few, out)
    if has_prompts:
        chunks = rows.chunks or plan_rows(rows, len(qkv)).chunks
        assert chunks is not None
        delta_net_prompts(qkv, z, b, a, weights, state, rows, chunks, out, tiles)
    return out


def _check(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
) -> None:
    tokens, conv_dim = qkv.shape
    slots, value_heads, value_dim, key_dim = state.state.shape
    key_heads = state.key_heads
    assert conv_dim == 2 * key_heads * key_dim + value_heads * value_dim
    assert value_heads % key_heads == 0
    assert z.shape == (tokens, value_heads * value_dim)
    assert b.shape == a.shape == (tokens, value_heads)
    assert weights.conv.shape[0] == conv_dim and weights.norm.shape == (value_dim,)
    assert weights.a_log.shape == weights.dt_bias.shape == (value_heads,)
    assert state.conv.shape == (slots, weights.conv.shape[1], conv_dim)
    assert all(tensor.stride(1) == 1 for tensor in (qkv, z, b, a))
    assert state.conv.dtype == weights.conv.dtype == qkv.dtype == z.dtype
    vectors = weights.a_log, weights.dt_bias, weights.norm, rows.cu_seqlens, rows.cache_seqlens
    assert all(tensor.is_contiguous() for tensor in (*vectors, rows.slots))
    assert rows.slots.dtype in (torch.int32, torch.int64)
    assert state.conv[0].is_contiguous() and state.state[0].is_contiguous()
    assert rows.cu_seqlens.shape == (rows.num_rows + 1,)
    assert rows.cache_seqlens.shape == (rows.num_rows,)
    assert rows.cu_seqlens.dtype == rows.cache_seqlens.dtype == torch.int32
    if rows.snapshots is not None:
        first, slots = rows.snapshots.first, rows.snapshots.slots
        assert first.dtype == slots.dtype == torch.int32 and first.is_contiguous()
        assert len(first) == len(slots) == rows.num_rows and slots.stride(1) == 1
        assert slots.shape[1] == 1 or rows.max_tokens <= MAX_DECODE_TOKENS or rows.token_by_token
