"""Sequence: the engine's record of one request.  The scheduler alone writes it."""

from __future__ import annotations

from runtime.messages import EngineRequest, FinishReason, TokenLogprob
from runtime.scheduler.page_pool import PageHash, chain_root, extend_chain, page_hash


class Sequence:
    """One request from its arrival to its last Output.

    tokens     known on the host: the prompt, then what was committed
    launched   positions of the KV cache that are written or queued to be, until it has caught up
    ahead      of one that was preempted: tokens that the device has sampled, or will with what is
               queued, and the host has not read: 0 or 1 until there is speculation
    pages      hold positions 0 .. len(pages) * page_size - 1; empty while it waits

    What changes with each token of those that have caught up is in columns (decoding.py).
    """

    __slots__ = (
        "begins",
        "cached",
        "finish",
        "first_output_sent",
        "hashes",
        "held",
        "limit",
        "num_computed_tokens",
        "num_waiting_tokens",
        "order",
        "pages",
        "preemptions",
        "prompt_len",
        "prompt_scores",
        "request",
        "request_id",
        "root",
        "seed",
        "slot",
        "started",
        "steps_at_admission",
        "stop_ids",
        "tokens",
        "unread_tokens",
    )

    def __init__(
        self, request: EngineRequest, *, seed: int, order: int, max_model_len: int
    ) -> None:
        params = request.params
        self.request = request
        self.request_id = request.id
        self.seed = seed
        self.order = order  # of arrival, kept through preemptions
        self.tokens = list(request.tokens)
        self.prompt_len = len(request.tokens)
        self.limit = min(self.prompt_len + params.max_tokens, max_model_len)  # tokens at its end
        self.stop_ids = frozenset(params.stop_ids)
        self.num_computed_tokens = 0
        self.unread_tokens = 0
        self.slot = -1  # none
        self.begins = False  # its slot has to start over, and to be told all its pages
        self.held: float | None = None  # since when it waits for a mask: no row, and no new slot
        self.pages: list[int] = []
        self.num_waiting_tokens = 0  # tokens that were known when it came to wait
        self.hashes: list[PageHash] = []
        self.root = chain_root(request.salt)
        self.finish: FinishReason | None = None
        self.first_output_sent = False  # its first Output was made
        self.cached = 0
        self.started = 0.0
        self.preemptions = 0
        self.steps_at_admission: tuple[int, int] | None = (
            None  # steps and rows that had been run before it
        )
        self.prompt_scores: list[TokenLogprob | None] | None = None

    @property
    def num_new_tokens(self) -> int:
        """Tokens to feed until it has caught up: a prompt, what a preemption lost, or one."""
        return len(self.tokens) + self.unread_tokens - self.num_computed_tokens

    @property
    def may_use_prefix_cache(self) -> bool:
        """Nobody asks for what computing its first tokens would show."""
        params = self.request.params
        mean = params.pooling is not None and params.pooling.kind == "mean"
        return params.prompt_logprobs is None and not mean

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all sequences: the smallest runs first and is preempted last."""
        return (self.request.priority, self.order)

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
