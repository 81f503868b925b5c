"""ProgressReport: what the clients hear of a start, and what watches one with other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.engine.followers import Followers, StallWatch
from runtime.messages import Progress

PROGRESS_SECONDS = 0.1
WATCHED_FROM = "memory"  # the first phase of a GPU's start in which all ranks have their weights


class ProgressReport:
    """Sends the loading progress to the clients, at most every PROGRESS_SECONDS a phase.

    With other ranks the start is watched, from when all of them have loaded their weights.
    """

    def __init__(self, broadcast: Callable[[Progress], None], followers: Followers | None) -> None:
        self._broadcast, self._followers = broadcast, followers
        self._phase = ""
        self._last_sent = 0.0
        self._watch: StallWatch | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        if self._watch is not None:
            self._watch.alive()
        elif phase == WATCHED_FROM and self._followers is not None:
            self._watch = StallWatch(self._followers.fail)
        now = time.monotonic()
        if phase != self._phase or now - self._last_sent >= PROGRESS_SECONDS:
            self._phase, self._last_sent = phase, now
            self._broadcast(Progress(phase, done, total))

    def started(self) -> StallWatch | None:
        """The start is over -> what watches the steps with other ranks from now on."""
        if self._watch is not None:
            self._watch.watch_steps()
        return self._watch
