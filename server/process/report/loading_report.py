"""How far the start of the engine is: a bar on a terminal, dated lines of the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from runtime.messages import DOWNLOAD, Progress
from server.cli.terminal import ProgressLine
from server.loaded_model import PHASES

log = logging.getLogger("wavefill.report")

ORDER = tuple(phase for phase in PHASES if phase != DOWNLOAD)


class LoadingReport:
    """Shows the phases of a start.  A download has bars or lines of its own."""

    def __init__(self, *, json: bool, line: ProgressLine | None = None) -> None:
        """json: the log is read by a machine, also on a terminal"""
        self._line = line or ProgressLine(sys.stderr)
        self._bar = self._line.shown and not json
        self._phase, self._began, self._tenths = "", 0.0, 0

    def show(self, progress: Progress | None) -> None:
        """Called again and again, with what is known now."""
        if progress is None or progress.phase == DOWNLOAD:
            return
        tenths = 10 * progress.done // progress.total if progress.total else 0
        name = PHASES.get(progress.phase, progress.phase)
        new = progress.phase != self._phase
        if new:
            self._phase, self._began, self._tenths = progress.phase, time.monotonic(), tenths
        if self._bar:
            seconds = time.monotonic() - self._began
            self._line.show(f"{name}, {seconds:.0f} s", share_of_start(progress))
        elif new:
            log.info("%s", name)
        elif self._tenths < tenths < 10:
            self._tenths = tenths
            log.info("%s: %d %%", name, 10 * tenths)

    def end(self) -> None:
        """The engine is ready, or the server stops; the next start is shown anew."""
        self._line.clear()
        self._phase, self._began, self._tenths = "", 0.0, 0


def share_of_start(progress: Progress) -> float | None:
    """By the number of phases, and by what is done of one that is counted; None: not known."""
    if progress.phase not in ORDER:
        return None
    done = progress.done / progress.total if progress.total else 0.0
    return (ORDER.index(progress.phase) + min(done, 1.0)) / len(ORDER)
