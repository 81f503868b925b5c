"""A real GrammarManager in front of a fake process, whose answers take as long as a test wants."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from itertools import cycle
from pathlib import Path

from runtime.grammar.manager import GrammarManager
from runtime.grammar.messages import (
    Advance,
    Advanced,
    Compile,
    Compiled,
    FromGrammarProcess,
    ToGrammarProcess,
)

VOCAB_SIZE = 97
MASK_BYTES = (VOCAB_SIZE + 7) // 8


def mask_after(answer: Sequence[int]) -> bytes:
    """The mask behind the tokens of an answer: no other answer has the same."""
    return hashlib.blake2b(array("i", answer).tobytes(), digest_size=MASK_BYTES).digest()


class Clock:
    """Seconds; a wait for a reply advances them."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now


class FakeProcess:
    """A GrammarProcess with both of its channels."""

    def __init__(self, clock: Clock, delays: Iterable[float]) -> None:
        self.sender = self.receiver = self
        self._clock = clock
        self._delays = iter(delays)  # seconds from each message to its answer
        self._answers: dict[int, list[int]] = {}
        self._due: list[tuple[float, FromGrammarProcess]] = []
        self._advanced_at = 0.0  # one Advance is answered after the other

    def send(self, message: ToGrammarProcess) -> None:
        if isinstance(message, Compile):
            self._answers[message.key] = []
            due = self._clock.now + next(self._delays)
            self._due.append((due, Compiled(message.key, mask_after([]))))
        elif isinstance(message, Advance):
            masks: dict[int, bytes] = {}
            for key, tokens in message.tokens:
                self._answers[key] += tokens
                masks[key] = mask_after(self._answers[key])
            due = max(self._advanced_at, self._clock.now + next(self._delays))
            self._advanced_at = due
            self._due.append((due, Advanced(masks)))
        else:
            self._answers.pop(message.key, None)
        self._due.sort(key=lambda entry: entry[0])

    def receive(self, wait_seconds: float) -> list[FromGrammarProcess]:
        if self._due and self._due[0][0] > self._clock.now:
            self._clock.now = min(self._clock.now + wait_seconds, self._due[0][0])
        arrived = [message for due, message in self._due if due <= self._clock.now]
        self._due = self._due[len(arrived) :]
        return arrived

    def ended(self) -> str | None:
        return None

    def close(self) -> None:
        pass


class FakeGrammars(GrammarManager):
    def __init__(self, delays: list[float]) -> None:
        self.clock = Clock()
        super().__init__(Path(__file__), VOCAB_SIZE, clock=self.clock)
        self._delays = cycle(delays)

    def _start(self) -> FakeProcess:  # type: ignore[override]
        return FakeProcess(self.clock, self._delays)
