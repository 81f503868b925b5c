"""Batch: one step in columns, all that a rank needs to run it and nothing else.

One entry a row; rows that decode come first.  The scheduler makes it, encodes to the same bytes for
every rank, and never changes it afterwards.
"""

from __future__ import annotations

from msgspec import Struct

from runtime.messages import SamplingParams, TokenLogprob

LAST = -1  # in Batch.tokens: the token that the device sampled last for this slot


class NewRow(Struct, frozen=True, array_like=True):
    """What a slot must know of the sequence that moves in, sent once, with its first row."""

    slot: int
    params: SamplingParams
    seed: int
    prompt_len: int
    history: list[int]  # tokens known so far, prompt included; empty unless params.needs_history


class Batch(Struct, frozen=True, array_like=True):
    slots: list[int]
    starts: list[int]  # KV position of the row's first token
    q_lens: list[int]  # tokens the row feeds in this step
    tokens: list[int]  # flat, sum(q_lens) ids; LAST where only the device knows the id
    num_new_pages: list[int]  # pages appended to the row's page table
    new_pages: list[int]  # flat
    sample: list[bool]  # False: a prompt that goes on in a later step, or wants a vector only
    decode_rows: int  # the first so many rows feed one token each
    new_rows: list[NewRow]  # these slots start over with an empty page table

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Masks(Struct, frozen=True, array_like=True):
    """Which tokens some rows of a batch may take, known after its forward pass was queued.

    `bits` holds ceil(vocab / 8) bytes a row; token id t is bit t % 8 of byte t // 8.  The ends of
    these rows are part of it: stop ids are not masked by min_tokens on top.
    """

    rows: list[int]  # indices into the batch, of rows that sample
    bits: bytes


class Sampled(Struct, frozen=True, array_like=True):
    """What a step produced, one entry a row of its Batch."""

    tokens: list[int]  # LAST in rows that did not sample
    logprobs: list[TokenLogprob | None] | None = None  # None: no row asked
    # Of the prompt tokens fed by the row, each scored by the position before it, in order.  The
    # first token of a prompt has none.  None: no row asked.
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    errors: dict[int, str] = {}  # row -> why that row alone failed (logits that are not finite)
    vectors: dict[int, bytes] = {}  # row -> the pooled vector of the prompt that it completed
