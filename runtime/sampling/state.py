"""SamplerState: the sampling parameters and token counts of each slot, on the device.

A new sequence sends one row of 96 bytes; the new rows of a step are in one block of fixed size,
which a captured graph applies.  Token counts take two bytes each and are allocated at start-up, so
that graphs captured before the first request with penalties serve it too: 78 MB for 256 slots and
151,936 tokens, a thousandth of a GPU's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attention.common.dependent_launch import dependent_launch
from runtime.executor.transfers import upload
from runtime.messages import SamplingParams
from runtime.sampling.kernels.row import ROW, STOP_IDS, WIDTH, apply_rows
from runtime.scheduler.batch import NewRow

# In `counts`: the token occurs in the prompt.  The bits below count its occurrences in the output.
IN_PROMPT = 1 << 14
MAX_PARAM = 1 << 30
ROW_WORDS = WIDTH.value
NO_SLOT = -1  # first word of an unused row


def is_constrained(params: SamplingParams) -> bool:
    """Whether the logits need masks or biases that `sample` does not apply.

    runtime/sampling/constrained_rows.py applies them after the step.
    """
    return (
        bool(params.logit_bias)
        or bool(params.allowed_ids)
        or bool(params.banned)
        or bool(params.grammar)
        or has_many_stop_ids(params)
    )


def has_many_stop_ids(params: SamplingParams) -> bool:
    """Whether more ids are masked before min_tokens than a row of the state holds."""
    return params.min_tokens > 0 and len(params.stop_ids) > STOP_IDS


class SamplerState:
    """rows [slots, ROW_WORDS] int32, each a ROW; counts [slots, vocab] int16."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.rows = torch.zeros((num_slots, ROW_WORDS), dtype=torch.int32, device=device)
        self.counts = torch.zeros((num_slots, vocab_size), dtype=torch.int16, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes."""
        return self.rows.nbytes + self.counts.nbytes

    def pack(self, new_rows: Sequence[NewRow], block: NDArray[np.int32]) -> None:
        """Write the rows of new sequences into block [N, ROW_WORDS] int32 on the host.

        Unused rows get NO_SLOT.  Raises ValueError if the block has too few rows.
        """
        if len(new_rows) > len(block):
            raise ValueError(
                f"{len(new_rows)} sequences begin in one step and the block has {len(block)} "
                "rows: send them in several blocks"
            )
        block[len(new_rows) :, 0] = NO_SLOT
        packed = np.array([_packed(row, self.vocab_size) for row in new_rows], dtype=ROW)
        block[: len(new_rows)] = packed.view(np.int32).reshape(-1, ROW_WORDS)

    def apply(self, block: Tensor) -> None:
        """Store a packed block [N, ROW_WORDS] int32 on the device; a graph may capture this."""
        assert block.dtype == torch.int32 and block.shape[1] == ROW_WORDS and block.is_contiguous()
        options: dict[str, Any] = {"num_warps": 1, **dependent_launch(self.device)}
        apply_rows[(len(block),)](block, self.rows, **options)

    def count(self, slot: int, history: Sequence[int], prompt_len: int) -> None:
        """Reset the slot's counts to those of `history`, which begins with the prompt.

        Uses torch operations of varying sizes, so it must not be captured.
        """
        tokens = np.asarray(history, dtype=np.int64)
        output, times = np.unique(tokens[prompt_len:], return_counts=True)
        counts = np.zeros(self.vocab_size, dtype=np.int16)
        counts[output] = np.minimum(times, IN_PROMPT - 1)
        counts[tokens[:prompt_len]] |= IN_PROMPT
        self.counts[slot].copy_(upload(counts, self.device), non_blocking=True)


def _packed(new: NewRow, vocab_size: int) -> tuple[Any, ...]:
    """In the order of ROW.  Numbers are clamped to its types, beyond any limit that matters."""
    params: SamplingParams = new.params
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    seed = new.seed & 0xFFFF_FFFF_FFFF_FFFF
    min_p = min(params.min_p, 1.0)  # the most likely token always stays
    # A grammar decides where its row may end; more stop ids are masked by ConstrainedRows.
    below_min_tokens = (
        params.min_tokens > 0 and not params.grammar and not has_many_stop_ids(params)
    )
    stop_ids = params.stop_ids if below_min_tokens else ()
    return (
        new.slot,
        params.temperature,
        params.top_p,
        float(np.log(np.float32(min_p))) if min_p > 0 else -np.inf,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        params.has_penalties,
        top_k,
        seed & 0xFFFF_FFFF,
        seed >> 32,
        new.prompt_len,
        min(params.min_tokens, MAX_PARAM),
        (*stop_ids, *[-1] * (STOP_IDS - len(stop_ids))),
        (0, 0, 0),
    )
