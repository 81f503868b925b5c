"""Slots: the state of each running sequence between two steps.

A sequence moves into a slot with its first row and stays until it ends or is preempted; the next
one resets the slot.  Page tables, last tokens and token counts are on the device, where a step can
use them before the host knows them.  Sampling parameters do not change, and the host has to know
which features a step needs: they are kept on the host as columns.
"""

from __future__ import annotations

from operator import attrgetter

import msgspec
import numpy as np
import torch
from torch import Tensor

from runtime.executor.pooling import PoolingStates
from runtime.executor.transfers import upload
from runtime.messages import SamplingParams
from runtime.sampling.constraints import TokenConstraints
from runtime.sampling.rng import UniformCache
from runtime.scheduler.batch import Batch, Int64Array, NewRow

# In `counts`: the token occurs in the prompt.  The bits below count its occurrences in the output.
IN_PROMPT = 1 << 30
MAX_PARAM = 1 << 30

# The floats of SamplingParams are columns of the same name: a new one needs no line here.
_FLOATS = [field for field in msgspec.structs.fields(SamplingParams) if field.type is float]
_floats = attrgetter(*(field.name for field in _FLOATS))
_OPTIONAL = [field for field in _FLOATS if field.name not in ("temperature", "top_p")]
_optional = attrgetter(*(field.name for field in _OPTIONAL))
_OPTIONAL_OFF = tuple(field.default for field in _OPTIONAL)

PARAMS = np.dtype(
    [
        *((field.name, np.float32) for field in _FLOATS),
        ("top_k", np.int64),
        ("seed", np.uint64),
        ("prompt_len", np.int64),
        ("min_tokens", np.int64),
        ("logprobs", np.int64),  # -1: not requested
        ("penalties", np.bool_),
        ("bias", np.bool_),
        ("allowed", np.bool_),
        ("banned", np.bool_),
        ("prompt_logprobs", np.int64),  # -1: not requested
        ("plain", np.bool_),  # all of the above but temperature, seed and prompt_len is off
    ]
)


class SequenceSlots:
    """page_table [slots, max_pages] int32, last_token [slots] int64, counts [slots, vocab] int32;
    params [slots] on the host."""

    def __init__(
        self, num_slots: int, max_pages: int, vocab_size: int, device: torch.device
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self.page_table = torch.zeros((num_slots, max_pages), dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.params = np.zeros(num_slots, dtype=PARAMS)
        self.params["prompt_logprobs"] = -1
        self.stop_ids: list[tuple[int, ...]] = [()] * num_slots
        self.bias: list[tuple[Tensor, Tensor] | None] = [None] * num_slots  # ids, values
        self.constraints = TokenConstraints(num_slots, device)
        # The hidden state before the row's next token, for scoring a prompt prefilled in chunks.
        self.before: list[Tensor | None] = [None] * num_slots
        self.pooling_states = PoolingStates()
        self.uniforms = UniformCache(num_slots)
        self._counts: Tensor | None = None
        self.eager = (
            True  # sampled by sampling/eager.py; else by GraphStepRunner, with its own state
        )
        self._num_pages = np.zeros(num_slots, dtype=np.int64)

    @property
    def counts(self) -> Tensor:
        """Allocated when the first sequence with penalties arrives: most servers never see one."""
        if self._counts is None:
            shape = (len(self.params), self.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        return self._counts

    def begin(self, batch: Batch) -> None:
        """Apply the new sequences and new pages of a batch."""
        pages_before = self.begin_on_host(batch)
        if len(batch.new_pages):
            self.append_pages(batch, pages_before)

    def begin_on_host(self, batch: Batch) -> Int64Array:
        """Apply all but the new pages.  Returns the number of pages of each row's slot before, [B].

        The caller writes the new ones to `page_table`.
        """
        for row in batch.new_rows:
            self._reset(row)
        pages_before = self._num_pages[batch.slots]
        if len(batch.new_pages):
            self._num_pages[batch.slots] = pages_before + batch.num_new_pages
        return pages_before

    def needs_all_hidden_states(self, batch: Batch) -> bool:
        """Whether prompt log-probabilities or mean pooling need the hidden states of all tokens.

        Call it after `begin` or `begin_on_host`.
        """
        if self.pooling_states.need_all(batch.slots):
            return True
        column = self.params["prompt_logprobs"]
        if (column < 0).all():  # the usual case: a fifth of the time of checking the rows
            return False
        prefills = batch.starts < self.params["prompt_len"][batch.slots]
        return bool((prefills & (column[batch.slots] >= 0)).any())

    def _reset(self, row: NewRow) -> None:
        slot, params = row.slot, row.params
        self._num_pages[slot] = 0
        self.before[slot] = None
        self.stop_ids[slot] = params.stop_ids
        self.constraints.start_banning(slot, params, row.history[row.prompt_len :])
        self.pooling_states.reset(row)
        self.params[slot] = _columns(row)
        if self.eager:
            self.bias[slot] = self._upload_bias(params.logit_bias) if params.logit_bias else None
            self.constraints.reset(slot, params)
            self.uniforms.reset(slot)
            if params.has_penalties:
                self._count(row)

    def _upload_bias(self, bias: dict[int, float]) -> tuple[Tensor, Tensor]:
        ids = np.fromiter(bias.keys(), np.int64, len(bias))
        values = np.fromiter(bias.values(), np.float32, len(bias))
        return upload(ids, self.device), upload(values, self.device)

    def _count(self, row: NewRow) -> None:
        history = upload(np.asarray(row.history, dtype=np.int64), self.device)
        counts = self.counts[row.slot]
        counts.zero_()
        output = history[row.prompt_len :]
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        counts[history[: row.prompt_len]] += IN_PROMPT  # once, however often the token occurs

    def append_pages(self, batch: Batch, pages_before: Int64Array) -> None:
        """Append the new pages to those that each row's slot had."""
        added = batch.num_new_pages
        before = np.cumsum(added) - added
        columns = np.arange(len(batch.new_pages)) + np.repeat(pages_before - before, added)
        rows = np.repeat(batch.slots, added)
        where = np.stack([rows, columns, batch.new_pages])
        slots, columns_on_device, pages = upload(where, self.device).unbind()
        self.page_table[slots, columns_on_device] = pages.to(torch.int32)


def _columns(row: NewRow) -> tuple[float | int | bool, ...]:
    """In the order of PARAMS.  Counts are clamped to its types, beyond any limit that matters."""
    params: SamplingParams = row.params
    return (
        *_floats(params),
        min(params.top_k, MAX_PARAM),
        row.seed & 0xFFFF_FFFF_FFFF_FFFF,
        row.prompt_len,
        min(params.min_tokens, MAX_PARAM),
        -1 if params.logprobs is None else min(params.logprobs, MAX_PARAM),
        params.has_penalties,
        bool(params.logit_bias),
        bool(params.allowed_ids),
        bool(params.banned),
        -1 if params.prompt_logprobs is None else min(params.prompt_logprobs, MAX_PARAM),
        _is_plain(params),
    )


def _is_plain(params: SamplingParams) -> bool:
    """Whether sampling is greedy or at a temperature, without any other feature."""
    whole = params.top_k <= 0 and params.top_p >= 1 and _optional(params) == _OPTIONAL_OFF
    below_min_tokens = params.min_tokens > 0 and bool(params.stop_ids)
    changed = params.logit_bias or params.allowed_ids or params.banned
    return whole and not (below_min_tokens or changed) and params.logprobs is None
