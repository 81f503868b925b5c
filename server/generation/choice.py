"""One completion in progress: outputs of the engine -> chunks of text."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from runtime.ipc.client import Mailbox
from runtime.messages import FinishReason, RequestOutput, TokenLogprob
from server.generation.detokenizer import Detokenizer
from server.generation.stop import StopStrings


class ScoredToken(NamedTuple):
    """A token with its log-probability and its place in the text."""

    token: int
    offset: int  # where its text begins, in characters of the answer
    score: TokenLogprob | None  # None for the first token of a prompt


class TextChunk(NamedTuple):
    """What a RequestOutput adds to the completion."""

    text: str
    scored: list[ScoredToken]
    finish: FinishReason | None
    tokens: list[int]  # all that were generated, also those without text


class Choice:
    """Turns the outputs of one engine request into text, and ends it at a stop string."""

    __slots__ = (
        "_detokenizer",
        "_hidden_stop",
        "_length",
        "_min_tokens",
        "_scored",
        "_stops",
        "_visible",
        "cached",
        "ended",
        "finish",
        "first_token",
        "generated",
        "index",
        "last_token",
        "mailbox",
        "mean_batch",
        "preemptions",
        "prompt",
        "prompt_scores",
        "reasoning_tokens",
        "started",
        "stop_hit",
    )

    def __init__(
        self,
        index: int,
        mailbox: Mailbox,
        detokenizer: Detokenizer,
        stops: list[str],
        *,
        include_stop: bool,
    ) -> None:
        """For a submitted request.  include_stop: the text includes what stopped it."""
        self.index = index
        self.prompt = mailbox.request.tokens
        self.mailbox = mailbox
        self.cached = 0
        self.started = 0.0
        self.first_token = 0.0
        self.last_token = 0.0
        self.ended = 0.0
        self.preemptions = 0
        self.mean_batch = 0.0  # 0 until the engine has reported it
        self.generated = 0
        self.reasoning_tokens = 0  # of the generated ones
        self.finish: FinishReason | None = None
        self.stop_hit: str | int | None = None
        self.prompt_scores: list[TokenLogprob | None] | None = None
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._min_tokens = mailbox.request.params.min_tokens  # stop strings before it are ignored
        self._hidden_stop = not include_stop  # leave the stop token out of the text
        self._length = 0  # characters decoded
        self._visible = 0  # characters delivered
        self._scored: list[ScoredToken] = []

    def feed(self, output: RequestOutput) -> TextChunk:
        """Add an output.  After a chunk with `finish` the request of the engine can be aborted."""
        if output.started:
            self.started = output.started
        self.cached += output.cached
        if output.finish is not None:
            self.preemptions, self.mean_batch = output.preemptions, output.mean_batch
        if output.prompt_logprobs is not None:
            self.prompt_scores = output.prompt_logprobs
        tokens = output.tokens
        ended = output.finish
        if ended == "stop" and output.stop_id is not None:
            self.stop_hit = output.stop_id
            if self._hidden_stop:
                tokens = tokens[:-1]
        if self._stops is None and output.logprobs is None and not self._scored:
            self.generated += len(output.tokens)
            text = self._detokenizer.feed(tokens)
            if ended is not None:
                text += self._detokenizer.flush()
                self.finish = ended
            return TextChunk(text, [], ended, output.tokens)
        return self._feed_one_by_one(output, tokens)

    def stop_reason(self, eos_ids: Collection[int]) -> str | int | None:
        """The requested stop string or stop token that ended it, as in vLLM's `stop_reason`."""
        return None if self.stop_hit in eos_ids else self.stop_hit

    def _feed_one_by_one(self, output: RequestOutput, tokens: list[int]) -> TextChunk:
        # Stop strings and offsets need to know which token produced which text.
        text = ""
        scores = output.logprobs
        for place, token in enumerate(tokens):
            self.generated += 1
            if scores is not None:
                self._scored.append(ScoredToken(token, self._length, scores[place]))
            text += self._up_to_stop(self._detokenizer.feed([token]))
            if self.finish is not None:
                return self._chunk(text, output.tokens[: place + 1])
        self.generated += len(output.tokens) - len(tokens)
        if output.finish is not None:
            text += self._up_to_stop(self._detokenizer.flush())
            if self.finish is None and self._stops is not None:
                text += self._stops.flush()
            self.finish = self.finish or output.finish
        if scores is not None and len(tokens) < len(output.tokens):  # the stop token
            self._scored.append(ScoredToken(output.tokens[-1], self._length, scores[-1]))
        return self._chunk(text, output.tokens)

    def _up_to_stop(self, text: str) -> str:
        """The text that is certain to come before a stop string."""
        self._length += len(text)
        stops = self._stops
        if stops is None or self.generated <= self._min_tokens:
            return text
        text = stops.feed(text)
        if stops.hit is not None:
            self.finish = "stop"
            self.stop_hit = stops.hit
        return text

    def _chunk(self, text: str, tokens: list[int]) -> TextChunk:
        self._visible += len(text)
        if self.finish is None and not text:  # scores are sent with the text they belong to
            return TextChunk("", [], None, tokens)
        scored, self._scored = self._scored, []
        if self.finish is not None:
            return TextChunk(text, scored, self.finish, tokens)
        ready = [entry for entry in scored if entry.offset < self._visible]
        self._scored = scored[len(ready) :]
        return TextChunk(text, ready, None, tokens)
