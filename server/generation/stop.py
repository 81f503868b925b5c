"""Detection of stop strings in text that arrives in chunks."""

from __future__ import annotations


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
