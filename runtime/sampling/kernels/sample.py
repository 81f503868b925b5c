"""sample: one token a row from its logits, in three kernel launches of fixed grids.

    scan_groups        the maximum and weight of each group of 256 logits
    filter_rows        rows with top-k, top-p or min-p: what they keep, or already the token
    finish_rows        the token, and the state of its slot

A feature costs time only in the rows that use it; results are batch-invariant.  Tokens are those of
TorchSampler but for rounding: where a cumulative weight meets the random number, or the edge of the
nucleus, to about six digits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from attention.common.dependent_launch import dependent_launch
from runtime.sampling.kernels.few_candidates import FEW
from runtime.sampling.kernels.filter import filter_rows
from runtime.sampling.kernels.finish import finish_rows
from runtime.sampling.kernels.row import GROUP
from runtime.sampling.kernels.scan import scan_groups
from runtime.sampling.state import IN_PROMPT, SamplerState

# Low bits that are 0 in each type's numbers converted to float32.
SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
SCAN_TILE, SCAN_WARPS = 8, 4
FULL = 4096  # groups that fill a GPU: with fewer of them, a warp reads one
FILTER_CHUNK, FILTER_WARPS, FILTER_STAGES = 16, 16, 2
FINISH_WARPS = 4


def sample(
    logits: Tensor,
    slots: Tensor,
    positions: Tensor,
    state: SamplerState,
    last_token: Tensor,
    tokens_out: Tensor,
    usable_out: Tensor,
    output: Tensor | None = None,
) -> None:
    """Sample a token for each row of logits [R, vocab] bf16, fp16 or fp32; a graph may capture it.

    slots:      [R] int32; negative: the row is padding or is not sampled
    positions:  [R] int32, of the sampled tokens in their sequences
    last_token: [slots], any integers; the row's slot gets the token
    tokens_out: [R], any integers; -1 in rows without a slot, and where all logits are -inf, so
                that no token is allowed
    usable_out: [R] int8 or bool; false where a logit is NaN or +inf, and the token means nothing;
                in rows without a slot 256 logits are checked
    output:     [1] int32: of tokens_out and usable_out [N, R], the one that is written
    Also counts the token in rows with penalties.  Needs 12 bytes of scratch for
    256 logits, and 2 KB a row.
    """
    num_rows, vocab = logits.shape
    assert logits.dtype in SHIFTS and logits.stride(1) == 1 and vocab == state.vocab_size
    assert slots.shape == positions.shape == (num_rows,)
    places = () if output is None else (len(tokens_out),)
    assert tokens_out.shape == usable_out.shape == (*places, num_rows)
    assert tokens_out.stride(-1) == usable_out.stride(-1) == 1
    strides = 0, 0
    if output is None:
        output = positions  # of any numbers, which are multiplied by zero
    else:
        strides = tokens_out.stride(0), usable_out.stride(0)
    assert slots.dtype == positions.dtype == torch.int32
    if num_rows == 0:
        return
    groups = 16 * triton.cdiv(vocab, 16 * GROUP.value)  # a row's begin at a multiple of 64 bytes

    def scratch(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    maxima, sums = scratch(num_rows, groups), scratch(num_rows, groups)
    found, thresholds = scratch(num_rows, dtype=torch.int32), scratch(num_rows)
    active = scratch(num_rows, groups, dtype=torch.int32)
    values = scratch(num_rows, FEW.value)
    tokens = scratch(num_rows, FEW.value, dtype=torch.int32)
    inputs = (logits, slots, positions, state.rows, state.counts, maxima, sums)
    sizes = (logits.stride(0), vocab, groups)
    options = {"IN_PROMPT": IN_PROMPT, **_options(logits.device)}
    padded = triton.next_power_of_2(groups)
    tile = SCAN_TILE if num_rows * groups >= FULL else SCAN_WARPS
    scan_groups[(triton.cdiv(groups, tile), num_rows)](
        *inputs, *sizes, TILE=tile, num_warps=SCAN_WARPS, **options
    )
    filter_rows[(num_rows,)](
        *inputs, found, thresholds, active, values, tokens, *sizes, SHIFT=SHIFTS[logits.dtype],
        PADDED=padded, CHUNK=FILTER_CHUNK, STAGES=FILTER_STAGES, num_warps=FILTER_WARPS, **options,
    )  # fmt: skip
    finish_rows[(num_rows,)](
        *inputs, found, thresholds, last_token, tokens_out, usable_out, output, *sizes, *strides,
        PADDED=padded, num_warps=FINISH_WARPS, **options,
    )  # fmt: skip


def _options(device: torch.device) -> dict[str, Any]:
    """Without FMA, a penalty's product is rounded before it is subtracted, as in torch."""
    fusion = {"enable_fp_fusion": False} if device.type != "cpu" else {}
    return {**dependent_launch(device), **fusion}
