"""Batch: one scheduled step as arrays, which is all that the device side needs to run it.

The arrays have one entry a row, and rows that decode come first.  The scheduler builds a batch;
it is immutable afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from runtime.messages import PromptImage, SamplingParams, TokenLogprob

LAST = -1  # in Batch.tokens: the token that the device sampled last for this slot
DRAFT = -2  # in Batch.tokens: one that the device drafted after it

Int64Array = NDArray[np.int64]
NO_STATES: Int64Array = np.zeros(0, dtype=np.int64)  # never written to


class RowImage(Struct, frozen=True):
    """An image of a row's prompt: where its tokens are, and the name of its features."""

    start: int
    width: int  # pixels
    height: int
    digest: bytes


class ImageStages(Struct, frozen=True):
    """Stages of the image encoder that a step runs for one image, before its model.

    Stages of an image follow each other from step to step, and no other image is begun meanwhile,
    unless this one is given up.  After the last one there are features by the name of `digest`.
    """

    digest: bytes
    first: int
    end: int  # the stage behind the last of them
    image: PromptImage | None = None  # its pixels, with stage 0


class NewRow(Struct, frozen=True):
    """What a slot needs to know of the sequence admitted to it; sent once, with its first row."""

    slot: int
    params: SamplingParams
    seed: int
    prompt_len: int
    history: list[int]  # tokens known so far, prompt included; empty unless params.needs_history
    images: tuple[RowImage, ...] = ()  # of its prompt


class Batch(Struct, frozen=True, eq=False):
    """The device counts the length of each slot itself: a decode row begins there.

    The host may schedule a row before it knows how many drafts of the last one were accepted.
    `starts` of decode rows are the positions if all were, and exact without drafts.
    """

    slots: Int64Array
    starts: Int64Array  # KV position of the row's first token; the largest possible if it decodes
    q_lens: Int64Array  # tokens of the row that this step computes
    # Flat, sum(q_lens) ids.  Only the device knows those of decode rows: LAST, and a DRAFT each.
    tokens: Int64Array
    num_new_pages: Int64Array  # pages appended to the row's page table of each group
    new_pages: Int64Array  # flat: for each of them, one page of every group; -1: behind its window
    # False: a chunk that does not complete its prompt, or a prompt to be pooled.
    sample: NDArray[np.bool_]
    decode_rows: int  # the first so many rows decode: 1 .. max_tokens_per_row tokens each
    new_rows: list[NewRow]  # their slots are reset to empty page tables
    # Of models with recurrent states, else empty: that of each row, which the step changes.  Before
    # the step are copied, in this order: pages, states to snapshots, snapshots to states, states to
    # states, each (from, to).
    state_slots: Int64Array = NO_STATES
    # (row, position, state): what the row's state is at a position within it goes there, too.
    state_snapshots: tuple[tuple[int, int, int], ...] = ()
    page_copies: tuple[tuple[int, int], ...] = ()
    state_saves: tuple[tuple[int, int], ...] = ()
    state_loads: tuple[tuple[int, int], ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()
    # Of models that read images: what their encoder does before the step, in order; and the digests
    # whose features, or whatever there is of them, are given up: those that the step does not read
    # before its encoder runs, the others after the step.
    image_stages: tuple[ImageStages, ...] = ()
    images_dropped: tuple[bytes, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


def make_batch(
    slots: Sequence[int] = (),
    starts: Sequence[int] = (),
    q_lens: Sequence[int] = (),
    tokens: Sequence[int] = (),
    num_new_pages: Sequence[int] = (),
    new_pages: Sequence[int] = (),
    sample: Sequence[bool] = (),
    decode_rows: int = 0,
    new_rows: Sequence[NewRow] = (),
    state_slots: Sequence[int] = (),
) -> Batch:
    """A Batch of plain lists, each converted to an array."""
    columns = (slots, starts, q_lens, tokens, num_new_pages, new_pages)
    arrays = [np.array(column, dtype=np.int64) for column in columns]
    return Batch(
        *arrays,
        sample=np.array(sample, dtype=np.bool_),
        decode_rows=decode_rows,
        new_rows=list(new_rows),
        state_slots=np.array(state_slots, dtype=np.int64),
    )


class Masks(Struct, frozen=True):
    """The tokens that constrained rows of a batch may sample, known after forward() was queued.

    `bits` holds ceil(vocab / 8) bytes a row; token id t is bit t % 8 of byte t // 8.  The masks
    account for stop ids and min_tokens: the sampler does not mask stop ids on top.
    """

    rows: list[int]  # indices into the batch, of rows that sample; once for each of their tokens
    bits: bytes


class ModelRunnerOutput(Struct, frozen=True):
    """What a step computed, one entry a row of its Batch.

    tokens [B, max_tokens_per_row]: the accepted drafts and the token sampled after them, then LAST.
    LAST alone in rows that did not sample or had every token masked.
    """

    tokens: NDArray[np.int32]
    logprobs: list[list[TokenLogprob] | None] | None = None  # of these tokens; None: not requested
    # Of the prompt tokens that the row computed, each scored by the position before it, in order.
    # The first token of a prompt has none.  None: no row requested them.
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    errors: dict[int, str] = {}  # row -> why that row alone failed (logits that are NaN)
    embeddings: dict[int, bytes] = {}  # row -> the pooled vector of the prompt that it completed
    seconds: float | None = None  # that the device took; None: it has no clock of its own

    def sampled(self, row: int) -> list[int]:
        """The tokens of a row, without what follows them."""
        tokens: list[int] = self.tokens[row].tolist()
        return tokens[: tokens.index(LAST)] if LAST in tokens else tokens
