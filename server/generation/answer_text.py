"""Tokens of one completion -> its text up to a stop string, and their places in it."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from runtime.messages import RequestOutput, TokenLogprob
from server.generation.detokenizer import Detokenizer
from server.tool_calls.parser.parts import Part


class ScoredToken(NamedTuple):
    """A token with its log-probability and its place in the text."""

    token: int
    offset: int  # where its text begins, in characters of the answer
    score: TokenLogprob | None  # None if not asked for, and for the first token of a prompt
    part: Part = "content"  # in which its text begins


class WaitingTokens:
    """Tokens until the text that they belong to is delivered."""

    __slots__ = ("_offsets", "_scored")

    def __init__(self, *, scored: bool) -> None:
        """scored: False keeps their places only"""
        self._offsets: list[int] = []
        self._scored: list[ScoredToken] | None = [] if scored else None

    def add(self, token: int, offset: int, score: TokenLogprob | None) -> None:
        self._offsets.append(offset)
        if self._scored is not None:
            self._scored.append(ScoredToken(token, offset, score))

    def take(self, until: int | None) -> tuple[list[int], list[ScoredToken]]:
        """The places of those whose text begins before character `until`, None for all, and, if
        they were kept, the tokens themselves."""
        offsets, scored = self._offsets, self._scored
        count = len(offsets) if until is None else bisect_left(offsets, until)
        self._offsets = offsets[count:]
        if scored is None:
            return offsets[:count], []
        self._scored = scored[count:]
        return offsets[:count], scored[:count]


class StopStrings:
    """Returns text up to the first complete stop string, holding back what may become one.

    The stop string that is complete first ends the text, so the result does not depend on the
    boundaries of the chunks.
    """

    __slots__ = ("_held", "_include", "_stops", "hit")

    def __init__(self, stops: list[str], *, include: bool = False) -> None:
        self._stops = stops
        self._include = include  # whether the text includes the stop string
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """The text that is certain to come before any stop string.  Sets `hit` at the end."""
        buffer = self._held + text
        places = [(buffer.find(stop), stop) for stop in self._stops]
        found = [(place + len(stop), place, stop) for place, stop in places if place >= 0]
        if found:
            end, place, self.hit = min(found)
            self._held = ""
            return buffer[: end if self._include else place]
        keep = self._may_begin(buffer)
        self._held = buffer[keep:]
        return buffer[:keep]

    def _may_begin(self, buffer: str) -> int:
        """The first place from which `buffer` could be the beginning of a stop string."""
        first = len(buffer)
        for stop in self._stops:
            place = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), first)
            while place >= 0 and not stop.startswith(buffer[place:]):
                place = buffer.find(stop[0], place + 1, first)
            if place >= 0:
                first = place
        return first

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """Detokenizes a completion and ends it at a stop string."""

    __slots__ = (
        "_detokenizer",
        "_hidden_stop",
        "_length",
        "_min_tokens",
        "_stops",
        "_waiting",
        "delivered",
        "generated",
        "stop_hit",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: list[str],
        *,
        include_stop: bool,
        min_tokens: int,
        scored: bool,
        placed: bool = False,
    ) -> None:
        """
        include_stop   the text includes what stopped it
        min_tokens     before so many, stop strings are ignored
        scored         `take_places` returns the tokens, with their log-probabilities if the engine
                       reports any
        placed         it returns their places
        """
        self.generated = 0  # tokens up to the end of the text
        self.delivered = 0  # characters that `feed` has returned
        self.stop_hit: str | int | None = None  # the stop string or stop token that ended it
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops, include=include_stop) if stops else None
        self._min_tokens = min_tokens
        self._hidden_stop = not include_stop  # leave the stop token out of the text
        self._length = 0  # characters decoded, if any token is looked at by itself
        self._waiting = WaitingTokens(scored=scored) if scored or placed else None

    def feed(self, output: RequestOutput) -> str:
        """The text that is certain to come before a stop string.  Ends if stop_hit is a string."""
        text = self._next_text(output)
        self.delivered += len(text)
        return text

    def _next_text(self, output: RequestOutput) -> str:
        tokens = output.tokens
        if output.stop_id is not None and output.finish == "stop":
            self.stop_hit = output.stop_id
            if self._hidden_stop:
                tokens = tokens[:-1]
        if self._stops is not None or self._waiting is not None:
            return self._feed_one_by_one(output, tokens)
        self.generated += len(output.tokens)
        text = self._detokenizer.feed(tokens)
        return text if output.finish is None else text + self._detokenizer.flush()

    def take_places(self, until: int | None) -> tuple[list[int], list[ScoredToken]]:
        """See WaitingTokens.take."""
        return ([], []) if self._waiting is None else self._waiting.take(until)

    def forget_places(self) -> None:
        """From now on no tokens and no places are asked for."""
        self._waiting = None

    def _feed_one_by_one(self, output: RequestOutput, tokens: list[int]) -> str:
        # Stop strings and offsets need to know which token produced which text.
        text = ""
        waiting, scores = self._waiting, output.logprobs
        for place, token in enumerate(tokens):
            self.generated += 1
            if waiting is not None:
                waiting.add(token, self._length, scores[place] if scores else None)
            text += self._up_to_stop(self._detokenizer.feed([token]))
            if isinstance(self.stop_hit, str):
                return text
        self.generated += len(output.tokens) - len(tokens)
        if output.finish is not None:
            text += self._up_to_stop(self._detokenizer.flush())
            if self._stops is not None and self._stops.hit is None:
                text += self._stops.flush()
        if waiting is not None and len(tokens) < len(output.tokens):  # the stop token
            waiting.add(output.tokens[-1], self._length, scores[-1] if scores else None)
        return text

    def _up_to_stop(self, text: str) -> str:
        self._length += len(text)
        stops = self._stops
        if stops is None or self.generated <= self._min_tokens:
            return text
        text = stops.feed(text)
        if stops.hit is not None:
            self.stop_hit = stops.hit
        return text
