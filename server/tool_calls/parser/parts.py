"""Which part of the answer each place of its text belongs to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

# A mark is what stands around reasoning and messages, and white space that is dropped there.
Part = Literal["content", "reasoning", "call", "mark"]


@dataclass(slots=True)
class Parts:
    """Places are characters from the start of the answer's text, as it was fed to the parser."""

    decided: int = 0  # the part of what begins before this place is certain
    _spans: deque[tuple[int, Part]] = field(default_factory=deque[tuple[int, Part]])  # end, part
    _passed: Part = "content"  # of the last span that was taken out

    def note(self, part: Part, end: int) -> None:
        """From the place that was noted last up to `end` it is this part."""
        if end <= self.decided:
            return
        self.decided = end
        if self._spans and self._spans[-1][1] == part:
            self._spans[-1] = end, part
        else:
            self._spans.append((end, part))

    def at(self, place: int) -> Part:
        """The part at this place, which is not before the one that was asked for last.

        Behind the end of the text, where the token is that ended it, it is the last part; no token
        there is one of the reasoning.
        """
        spans = self._spans
        while spans and spans[0][0] <= place:
            _, self._passed = spans.popleft()
        if spans:
            return spans[0][1]
        return "mark" if self._passed == "reasoning" else self._passed
