"""What a terminal can show: styles, its width, and one line that is written over."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import TextIO

from runtime.logs import ERASE_LINE, is_terminal

DIM, BOLD, RED, GREEN, YELLOW, CYAN = "2", "1", "31", "32", "33", "36"
FULL_BLOCK, PARTS = "\u2588", " \u258f\u258e\u258d\u258c\u258b\u258a\u2589"  # eighths of a column
MIN_REDRAW_SECONDS = 0.05
BAR_COLUMNS = 24


def has_colour(stream: TextIO) -> bool:
    """See https://no-color.org for NO_COLOR."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def styled(text: str, style: str, stream: TextIO) -> str:
    """`text` in a style, plain where the stream has none."""
    return f"\033[{style}m{text}\033[0m" if text and has_colour(stream) else text


def columns() -> int:
    return shutil.get_terminal_size().columns


def draws_blocks(stream: TextIO) -> bool:
    """Whether the encoding has the characters of bars."""
    try:
        FULL_BLOCK.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(share: float, width: int, stream: TextIO) -> str:
    """A horizontal bar of `width` columns, of which `share` are filled."""
    share = min(max(share, 0.0), 1.0)
    if not draws_blocks(stream):
        return ("#" * round(share * width)).ljust(width, ".")
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    return (FULL_BLOCK * full + (PARTS[rest] if rest else "")).ljust(width)


class ProgressLine:
    """One line at the bottom of a terminal that is written over; nothing elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.shown = is_terminal(self._stream)
        self._drawn = 0.0
        self._text: str = ""

    def show(self, text: str, share: float | None = None) -> None:
        """Write the line again; `share` of a bar is filled, if there is one."""
        now = time.monotonic()
        done = share is not None and share >= 1
        if not self.shown or (now - self._drawn < MIN_REDRAW_SECONDS and self._text and not done):
            return
        drawn = "" if share is None else f"{bar(share, BAR_COLUMNS, self._stream)} {share:4.0%}  "
        line = (drawn + text)[: columns() - 1]
        if line != self._text:
            self._drawn, self._text = now, line
            self._stream.write(ERASE_LINE + line)
            self._stream.flush()

    def clear(self) -> None:
        if self.shown and self._text:
            self._text = ""
            self._stream.write(ERASE_LINE)
            self._stream.flush()
