# delta_net_decode: rows of 1 to 8 tokens, from the input projections to the output projection.
#   grid      B + AHEAD + 1 groups, each with the programs of a row's inputs and those of states
#             AHEAD rows before, so that inputs are computed while states of earlier rows are read.
#             A program of inputs has some channels, one of states the state of a value head in
#             registers; both handle a row's tokens one after the other.  The programs of states
#             after those of the last row zero the output of padding
#   reads     qkv, z, b, a at the row's tokens; the layer's weights; of the row's slot the last
#             inputs of the convolution, and the state, unless the sequence begins with this row
#   writes    inputs: qk [P, 2, Hk, Dk], queries / sqrt(Dk) and keys, of norm 1, v [P, Hv, Dv],
#             gates [P, Hv, 2], the decay exp(g) and beta, all float32, of as many tokens as there
#             are, or as such rows can have; the last inputs of the convolution, in place.
#             States: out [T, Hv * Dv], after the gated norm; the state, in place.  Where the
#             sequence reaches a position of `snapshots`, copies of both
#   math      float32, and the state rounded to its type.  With S as it is stored, [Dv, Dk], before
#             it decays, S k and S q are summed at once: with the decay e, o = e S q + (q^T k) d
#   order     A row's programs of inputs count themselves at READY, for which its programs of states
#             wait; the last of these to count itself resets the counts.  Programs of inputs have
#             lower indices than those that wait for them, and a GPU starts programs in their order
#   launch    before the wait a program of states reads lengths, slots and the state, all of earlier
#             steps
#   bound     memory: each state once read and once written, 2 * B * Hv * Dk * Dv * 4 bytes.  What
#             is read stays in L2 until it is replaced there (evict_last); what delays the end of a
#             program of states costs bandwidth, since three states are all that is on its way
#   checked   tests/model_zoo/layers/delta_net/test_delta_net_decode.py against float64
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from model_zoo.layers.delta_net.decode.inputs import decode_inputs
from model_zoo.layers.delta_net.decode.states import decode_states
from model_zoo.layers.delta_net.inputs import (
    MAX_DECODE_TOKENS,
    DeltaNetRows,
    DeltaNetState,
    DeltaNetWeights,
)
from model_zoo.layers.delta_net.tiles import power_of_two_within
from model_zoo.layers.gemm.implementations import TILES, workspace

ANY = 1 << 30  # tokens of a row
CHANNELS = 512  # that a program of inputs has, at most
WARPS = 4
RESIDENT = 3  # programs of float32 states of 128 x 128 that a multiprocessor has at once


@triton.jit(do_not_specialize=["tokens", "num_rows", "ahead", "per_row"])
def _decode(
    QKV, B, A, WEIGHT, A_LOG, DT_BIAS, CONV, STATE, Z, NORM, READY, CU_SEQLENS, LENGTHS, SLOTS,
    SNAPSHOTS_AT, SNAPSHOTS, QK, V, GATES, OUT, tokens, num_rows, ahead, per_row, eps, qkv_row,
    b_row, a_row, tap_channel, tap, conv_slot, snapshots_row, z_row, state_slot, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    K: tl.constexpr, MAX_TOKENS: tl.constexpr, BORDERS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    INPUTS: tl.constexpr = 2 * HK * DK // KEYS + HV * DV // VALUES
    group, index = tl.program_id(0) // (INPUTS + HV), tl.program_id(0) % (INPUTS + HV)
    if index < INPUTS:
        if DEPENDENT:
            wait_for_launcher()
        if group < num_rows:
            decode_inputs(
                QKV, B, A, WEIGHT, A_LOG, DT_BIAS, CONV, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT,
                SNAPSHOTS, QK, V, GATES, index, group, per_row, qkv_row, b_row, a_row, tap_channel,
                tap, conv_slot, snapshots_row, HK, HV, DK, DV, KEYS, VALUES, K, MAX_TOKENS, BORDERS,
            )  # fmt: skip
            tl.debug_barrier()  # of all threads, whose writes the atomic publishes
            tl.atomic_add(READY + group, 1, sem="release")
    elif group >= ahead:
        decode_states(
            QK, V, GATES, STATE, Z, NORM, READY, CU_SEQLENS, LENGTHS, SLOTS, SNAPSHOTS_AT,
            SNAPSHOTS, OUT, tokens, eps, index - INPUTS, group - ahead, num_rows, per_row, z_row,
            state_slot, snapshots_row, HK, HV, DK, DV, INPUTS, MAX_TOKENS, BORDERS, DEPENDENT,
        )  # fmt: skip


def delta_net_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    weights: DeltaNetWeights,
    state: DeltaNetState,
    rows: DeltaNetRows,
    out: Tensor,
) -> None:
    """gated_delta_net of the rows with at most MAX_DECODE_TOKENS tokens, or of all of them if
    they are to be computed token by token, into out [T, Hv * Dv]."""
    tokens, num_rows, (_, heads, value_dim, key_dim) = len(qkv), rows.num_rows, state.state.shape
    keys, values = state.key_heads * key_dim, heads * value_dim
    assert out.is_contiguous() and num_rows <= TILES
    most = ANY if rows.token_by_token else MAX_DECODE_TOKENS
    per_row = min(rows.max_tokens, most)
    places = num_rows * per_row
    if places >= tokens:
        per_row, places = 0, tokens
    scratch = [
        torch.empty(places, numbers, dtype=torch.float32, device=qkv.device)
        for numbers in (2 * keys, values, 2 * heads)
    ]
    snapshots, borders, snapshots_row = (None, None), 0, 0
    if rows.snapshots is not None:
        snapshots = rows.snapshots.first, rows.snapshots.slots
        borders, snapshots_row = rows.snapshots.slots.shape[1], rows.snapshots.slots.stride(0)
    key_block, value_block = (power_of_two_within(size, CHANNELS) for size in (keys, values))
    inputs = 2 * keys // key_block + values // value_block  # programs of a row
    wave = RESIDENT * multiprocessors(qkv.device)
    ahead = min(num_rows, -(-wave // (inputs + heads)))
    _decode[((num_rows + ahead + 1) * (inputs + heads),)](
        qkv, b, a, weights.conv, weights.a_log, weights.dt_bias, state.conv, state.state, z,
        weights.norm, workspace(qkv.device)[1], rows.cu_seqlens, rows.cache_seqlens, rows.slots,
        *snapshots, *scratch, out, tokens, num_rows, ahead, per_row, weights.norm_eps,
        qkv.stride(0), b.stride(0), a.stride(0), *weights.conv.stride(), state.conv.stride(0),
        snapshots_row, z.stride(0), state.state.stride(0), HK=state.key_heads, HV=heads, DK=key_dim,
        DV=value_dim, KEYS=key_block, VALUES=value_block, K=weights.conv.shape[1], MAX_TOKENS=most,
        BORDERS=borders, num_warps=WARPS, **dependent_launch(qkv.device),
    )  # fmt: skip


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors; a CPU interprets the kernel, one program after the other."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
