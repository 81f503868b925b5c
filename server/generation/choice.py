"""One completion in progress: outputs of the engine -> chunks of its answer."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Literal, LiteralString, NamedTuple

from runtime.ipc.client import Mailbox
from runtime.messages import FinishReason, RequestOutput, TokenLogprob
from server.engine import Engine
from server.errors import EngineFailed, RequestError, Unavailable
from server.generation.answer_text import AnswerText, ScoredToken
from server.generation.choice_stats import ChoiceStats
from server.metrics.metrics import Metrics
from server.tool_calls.output_parser import OutputParser
from server.tool_calls.parser.deltas import ContentDelta, Delta

RETRY_SECONDS = 5  # for a request that met the end of its server

ChatFinish = FinishReason | Literal["tool_calls"]


class Chunk(NamedTuple):
    """What an output of the engine adds to a completion."""

    deltas: Sequence[Delta]
    scored: Sequence[ScoredToken]  # whose part is certain; none if only the text is asked for
    finish: ChatFinish | None
    tokens: list[int]  # all that were generated, also those without text

    @property
    def text(self) -> str:
        """The content."""
        return "".join([delta.text for delta in self.deltas if isinstance(delta, ContentDelta)])


def unanswered(template: LiteralString, mailbox: Mailbox, output: RequestOutput) -> RequestError:
    """The error for a request of the engine that ended without its answer; {} is the reason."""
    reason = output.error or "it was aborted"
    if mailbox.stopped:
        return Unavailable(template, reason, code="draining", retry_after_s=RETRY_SECONDS)
    return EngineFailed(template, reason)


class Choice:
    """Follows one request of the engine, and is the only writer of its state.

    It tells the metrics of its tokens and of its end, and the engine of an end that the engine
    does not see.
    """

    __slots__ = (
        "_engine",
        "_metrics",
        "_parser",
        "_text",
        "finish",
        "index",
        "mailbox",
        "prompt_scores",
        "reasoning_tokens",
        "stats",
    )

    def __init__(
        self,
        index: int,
        mailbox: Mailbox,
        text: AnswerText,
        parser: OutputParser | None,
        engine: Engine,
        metrics: Metrics,
    ) -> None:
        """parser: None if the whole text is content"""
        self.index = index
        self.mailbox = mailbox
        self.finish: FinishReason | None = None
        self.prompt_scores: list[TokenLogprob | None] | None = None
        self.reasoning_tokens = 0  # of the generated ones; their delimiters do not count
        self.stats = ChoiceStats(len(mailbox.request.tokens), mailbox.arrived)
        self._text = text
        self._parser = parser
        self._engine = engine
        self._metrics = metrics

    @property
    def prompt(self) -> list[int]:
        return self.mailbox.request.tokens

    @property
    def stop_hit(self) -> str | int | None:
        """The stop string or stop token that ended it."""
        return self._text.stop_hit

    def stop_reason(self, eos_ids: Collection[int]) -> str | int | None:
        """The requested stop string or stop token that ended it, as in vLLM's `stop_reason`."""
        return None if self.stop_hit in eos_ids else self.stop_hit

    def feed(self, output: RequestOutput) -> Chunk:
        """Add an output.  Raises RequestError; of the engine, see `unanswered`."""
        stats, tokens, ended = self.stats, output.tokens, output.finish
        if tokens:
            now = time.monotonic()
            if stats.last_token:
                self._metrics.inter_token(now - stats.last_token)
            else:
                stats.first_token = now
                self._metrics.first_token(now - stats.arrived)
            stats.last_token = now
        if ended == "error" or ended == "abort":
            self._end(ended)
            raise self._failure(output)
        stats.add(output)
        if output.prompt_logprobs is not None:
            self.prompt_scores = output.prompt_logprobs
        text = self._text.feed(output)
        if isinstance(self._text.stop_hit, str):  # a stop string: the engine does not see those
            if ended is None:
                self._engine.abort(self.mailbox.id)
            tokens = tokens[: self._text.generated - stats.generated]
            ended = "stop"
        stats.generated = self._text.generated
        if ended is not None:
            self._end(ended)
        parser = self._parser
        if parser is None:
            until = self._text.delivered if ended is None else None
            _, scored = self._text.take_places(until)
            return Chunk((ContentDelta(text),) if text else (), scored, ended, tokens)
        limited = ended == "length" or isinstance(self.stop_hit, str)
        deltas = parser.feed(text, last=ended is not None, limited=limited)
        scored = self._scored(parser, last=ended is not None)
        called = ended == "stop" and parser.calls_tools(self.stop_hit)
        return Chunk(deltas, scored, "tool_calls" if called else ended, tokens)

    def _scored(self, parser: OutputParser, *, last: bool) -> list[ScoredToken]:
        """The tokens whose part of the answer has become certain; counts those of reasoning."""
        offsets, scored = self._text.take_places(None if last else parser.decided)
        if not offsets:
            return scored
        parts = parser.parts_at(offsets)
        self.reasoning_tokens += parts.count("reasoning")
        if not (scored or parser.may_reason_later):
            self._text.forget_places()
        return [entry._replace(part=part) for entry, part in zip(scored, parts, strict=False)]

    def abort(self, by: str) -> None:
        """Stop the engine's work on it, unless it has ended."""
        if self.finish is None:
            self._end("abort")
            self._engine.abort(self.mailbox.id)
            self._metrics.aborted(by)

    def _end(self, finish: FinishReason) -> None:
        self.finish = finish
        stats = self.stats
        stats.ended = time.monotonic()
        self._metrics.request_finished(
            finish,
            stats.prompt_tokens,
            stats.generated,
            arrived=stats.arrived,
            started=stats.started,
            first_token=stats.first_token,
            ended=stats.ended,
        )

    def _failure(self, output: RequestOutput) -> RequestError:
        if output.is_request_error:
            code = "invalid_grammar" if self.mailbox.request.params.grammar else "invalid_value"
            return RequestError("{}", output.error or "", code=code)
        return unanswered("the answer was cut off: {}", self.mailbox, output)
