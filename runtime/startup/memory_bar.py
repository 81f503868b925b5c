"""How memory is divided, as one line of a terminal: a bar whose parts begin with their letters."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from typing import TextIO

FREE = "unused"
MAX_WIDTH = 100
COLOURS = ("44", "45", "46", "43", "42", "41")  # backgrounds, in the order of the parts
INK, RESET = "\033[30;", "\033[0m"


def bar_width(stream: TextIO | None = None) -> int:
    """Columns for a bar; 0 where no person looks at the output."""
    out = stream or sys.stdout
    if not out.isatty() or os.environ.get("TERM") == "dumb":
        return 0
    return min(MAX_WIDTH, shutil.get_terminal_size().columns - 4)


def shares(sizes: Sequence[int], width: int) -> list[int]:
    """Columns of each part, `width` in all; a part that is not empty has one at least."""
    total = sum(sizes)
    columns = [max(1, size * width // total) if size > 0 else 0 for size in sizes]
    # The largest part gives or takes what rounding left.
    columns[max(range(len(sizes)), key=lambda i: columns[i])] += width - sum(columns)
    return columns


def memory_bar(parts: Sequence[tuple[str, int]], width: int, *, colour: bool) -> str:
    """One line; `parts` are names and bytes.  What is unused stays empty, or dots."""
    names = [name for name, size in parts if size > 0]
    columns = shares([size for _, size in parts if size > 0], width)
    drawn: list[str] = []
    for index, (name, count) in enumerate(zip(names, columns, strict=True)):
        letter = name[0].upper()
        if name == FREE:
            drawn.append("." * count)
        elif colour:
            text = letter.ljust(count)
            drawn.append(f"{INK}{COLOURS[index % len(COLOURS)]}m{text}{RESET}")
        else:
            drawn.append(letter * count)
    return f"  [{''.join(drawn)}]"
