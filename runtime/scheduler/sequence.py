"""Sequence: the engine's record of one request, written by the scheduler only."""

from __future__ import annotations

from dataclasses import KW_ONLY, InitVar, dataclass, field

from runtime.messages import EngineRequest, FinishReason, TokenLogprob
from runtime.scheduler.kv_cache.page_pool import (
    PageHash,
    chain_root,
    extend_chain,
    images_between,
    page_hash,
)
from runtime.scheduler.kv_cache.sequence_pages import SequencePages
from runtime.snapshot import SequenceEvent

MAX_EVENTS = 256  # of one sequence: enough for a prompt of a million tokens in chunks of 4096


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from its arrival to its last output.

    tokens               known on the host: the prompt, then the committed tokens
    num_computed_tokens  positions of the KV cache that are written or queued to be, during prefill
    has_unread_row       of a preempted sequence: a step in flight samples for it, and the number of
                         tokens is unknown until it is committed
    pages                of the positions that are written or will be next; empty while it waits

    What changes with each token of a decoding sequence is in decode_columns.py.
    """

    request: EngineRequest
    _: KW_ONLY
    seed: int
    arrival_index: int  # kept through preemptions
    max_model_len: InitVar[int]
    request_id: int = field(init=False)
    tokens: list[int] = field(init=False)
    prompt_len: int = field(init=False)
    max_len: int = field(init=False)  # of prompt and answer
    stop_ids: frozenset[int] = field(init=False)
    root: PageHash = field(init=False)
    hashes: list[PageHash] = field(default_factory=list[PageHash])
    num_computed_tokens: int = 0
    has_unread_row: bool = False
    slot: int = -1  # none
    needs_slot_init: bool = False  # its next row resets the slot and sends all its pages
    held_since: float | None = None  # it waits for a mask and gets no row and no new slot
    pages: SequencePages = field(default_factory=lambda: SequencePages(1))
    snapshot_at: int = 0  # position of the last snapshot of its recurrent state
    # Position and place of those that are not usable yet.
    pending_snapshots: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    num_waiting_tokens: int = 0  # len(tokens) when it entered the waiting queue
    finish: FinishReason | None = None
    first_output_sent: bool = False
    num_cached_tokens: int = 0
    num_encoder_tokens: int = 0  # prompt tokens that take as long as encoding its images did
    first_scheduled_at: float = 0.0
    preemptions: int = 0
    steps_at_admission: tuple[int, int] | None = None  # steps and rows before its first admission
    prompt_scores: list[TokenLogprob | None] | None = None
    events: list[SequenceEvent] = field(default_factory=list[SequenceEvent])  # MAX_EVENTS at most

    def __post_init__(self, max_model_len: int) -> None:
        params = self.request.params
        self.request_id = self.request.id
        self.tokens = list(self.request.tokens)
        self.prompt_len = len(self.tokens)
        self.max_len = min(self.prompt_len + params.max_tokens, max_model_len)
        self.stop_ids = frozenset(params.stop_ids)
        self.root = chain_root(self.request.salt)

    def note_event(self, at: float, tokens: int) -> None:
        """See SequenceEvent."""
        if len(self.events) < MAX_EVENTS:
            self.events.append((at, tokens))

    @property
    def num_new_tokens(self) -> int:
        """Tokens left to prefill: of a prompt, of what a preemption dropped, or one."""
        return len(self.tokens) - self.num_computed_tokens

    @property
    def may_use_prefix_cache(self) -> bool:
        """Whether no output needs the first tokens computed (prompt logprobs, mean pooling)."""
        params = self.request.params
        mean = params.pooling is not None and params.pooling.kind == "mean"
        return params.prompt_logprobs is None and not mean

    @property
    def priority_key(self) -> tuple[int, int]:
        """The smallest key is admitted first and preempted last."""
        return (self.request.priority, self.arrival_index)

    def hash_page(self, content: bytes, page_size: int) -> bool:
        """Hash the last full page of its known tokens, which holds `content`, if it is the next."""
        hashes = self.hashes
        if not content or len(hashes) != len(self.tokens) // page_size - 1:
            return False
        if self.request.images:
            content += self._images_in(len(hashes), page_size)
        hashes.append(page_hash(hashes[-1] if hashes else self.root, content))
        return True

    def hash_pages(self, page_size: int) -> list[PageHash]:
        """The hashes of all full pages of its known tokens."""
        if not self.request.images:
            extend_chain(self.hashes, self.root, self.tokens, page_size)
        else:
            extend_chain(
                self.hashes,
                self.root,
                self.tokens,
                page_size,
                lambda page: self._images_in(page, page_size),
            )
        return self.hashes

    def _images_in(self, page: int, page_size: int) -> bytes:
        return self.images_between(page * page_size, (page + 1) * page_size)

    def images_between(self, first: int, last: int) -> bytes:
        return images_between(self.request.images, first, last)
