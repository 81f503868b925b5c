"""How far a download is: bars on a terminal, else lines of the log; and for a callback."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

log = logging.getLogger("wavefill.model")

LOG_SECONDS = 10.0  # between two lines of the log
REPORT_SECONDS = 0.1  # between two calls of the callback
MIN_SECONDS = 1.0  # of a download before its time is estimated

Report = Callable[[int, int, int | None], None]  # bytes here, bytes in all, seconds left if known


class DownloadProgress:
    """Counts the bytes of one download.

    The library counts files into its total as it begins them, a few at a time: `missing` returns
    the bytes of all.  It asks the Hub, in a thread, once something has to be downloaded.
    """

    def __init__(self, name: str, missing: Callable[[], int], report: Report | None) -> None:
        self._name, self._missing, self._report = name, missing, report
        self._logs = not sys.stderr.isatty()
        self._lock = threading.Lock()
        self._began: tuple[float, int] | None = None  # when, and how many bytes were here
        self.planned = 0
        self._logged, self._reported = time.monotonic(), 0.0

    def moved(self, done: int, total: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._began is None and total:
                self._began = now, done
                threading.Thread(target=self._plan, daemon=True).start()
            total = max(total, self.planned)
            if not total:
                return
            if self._logs and now - self._logged >= LOG_SECONDS:
                self._logged = now
                log.info("%s: %d of %d MiB are here", self._name, done >> 20, total >> 20)
            if self._report is not None and now - self._reported >= REPORT_SECONDS:
                self._reported = now
                self._report(done, total, self._seconds_left(now, done, total))

    def _plan(self) -> None:
        self.planned = self._missing()
        if self._logs:
            size = f"{self.planned >> 20} MiB" if self.planned else "of unknown size"
            log.info("%s: downloading, %s", self._name, size)

    def _seconds_left(self, now: float, done: int, total: int) -> int | None:
        began, before = self._began or (now, done)
        if now - began < MIN_SECONDS or done <= before or not self.planned:
            return None
        return round((total - done) * (now - began) / (done - before))


def progress_bars(progress: DownloadProgress) -> type[Any]:
    """The class of the library's bars, which also move `progress`."""
    from huggingface_hub.utils import are_progress_bars_disabled, tqdm

    class ReportedBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            if not sys.stderr.isatty():
                options |= {"disable": are_progress_bars_disabled(), "file": io.StringIO()}
            super().__init__(*args, **options)  # pyright: ignore[reportUnknownMemberType]

        def update(self, n: float | None = 1) -> bool | None:
            shown = super().update(n)
            if self.unit == "B":
                progress.moved(int(self.n), int(self.total or 0))
            return shown

    return ReportedBar
