"""What an exception of a library says, in one line of a message."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of its text that is not empty, else its type: a MemoryError has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
