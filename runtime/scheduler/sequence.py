"""Sequence: the engine's record of one request, written by the scheduler only."""

from __future__ import annotations

from runtime.messages import EngineRequest, FinishReason, TokenLogprob
from runtime.scheduler.page_pool import PageHash, chain_root, extend_chain, page_hash


class Sequence:
    """One request from its arrival to its last output.

    tokens               known on the host: the prompt, then the committed tokens
    num_computed_tokens  positions of the KV cache that are written or queued to be, during prefill
    has_unread_row       of a preempted sequence: a step in flight samples for it, nobody knows how
                         many tokens, until it is committed
    pages                hold positions 0 .. len(pages) * page_size - 1; empty while it waits

    What changes with each token of a decoding sequence is in decode_columns.py.
    """

    __slots__ = (
        "arrival_index",
        "finish",
        "first_output_sent",
        "first_scheduled_at",
        "has_unread_row",
        "hashes",
        "held_since",
        "max_len",
        "needs_slot_init",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_waiting_tokens",
        "pages",
        "preemptions",
        "prompt_len",
        "prompt_scores",
        "request",
        "request_id",
        "root",
        "seed",
        "slot",
        "steps_at_admission",
        "stop_ids",
        "tokens",
    )

    def __init__(
        self, request: EngineRequest, *, seed: int, arrival_index: int, max_model_len: int
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.id
        self.seed = seed
        self.arrival_index = arrival_index  # kept through preemptions
        self.tokens = list(request.tokens)
        self.prompt_len = len(request.tokens)
        self.max_len = min(
            self.prompt_len + params.max_tokens, max_model_len
        )  # of prompt and answer
        self.stop_ids = frozenset(params.stop_ids)
        self.num_computed_tokens = 0
        self.has_unread_row = False
        self.slot = -1  # none
        self.needs_slot_init = False  # its next row resets the slot and sends all its pages
        self.held_since: float | None = (
            None  # since when it waits for a mask: it gets no row and no new slot
        )
        self.pages: list[int] = []
        self.num_waiting_tokens = 0  # len(tokens) when it entered the waiting queue
        self.hashes: list[PageHash] = []
        self.root = chain_root(request.salt)
        self.finish: FinishReason | None = None
        self.first_output_sent = False
        self.num_cached_tokens = 0
        self.first_scheduled_at = 0.0
        self.preemptions = 0
        # Steps and rows that had run when it was first admitted.
        self.steps_at_admission: tuple[int, int] | None = None
        self.prompt_scores: list[TokenLogprob | None] | None = None

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
        hashes.append(page_hash(hashes[-1] if hashes else self.root, content))
        return True

    def hash_pages(self, page_size: int) -> list[PageHash]:
        """The hashes of all full pages of its known tokens."""
        extend_chain(self.hashes, self.root, self.tokens, page_size)
        return self.hashes
