"""The launcher, as its children see it: lines on stdin, whose end means that it is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

ORPHANED = 3  # exit code

ArgsT = TypeVar("ArgsT")


def read_args(kind: type[ArgsT]) -> ArgsT:
    """The first line, which is JSON."""
    # Ctrl-C in a terminal reaches the whole process group; the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):  # unbuffered: the thread of `watch` reads on
        byte = os.read(0, 1)
        if not byte:
            sys.exit(ORPHANED)
        line += byte
    return msgspec.json.decode(line, type=kind)


def watch(on_line: Callable[[bytes], None] | None = None) -> None:
    """Hand over every further line, in a thread; end this process at once when stdin ends."""

    def run() -> None:
        begun = b""
        while data := os.read(0, 4096):
            *lines, begun = (begun + data).split(b"\n")
            for line in lines:
                if on_line is not None:
                    on_line(line)
        os._exit(ORPHANED)

    threading.Thread(target=run, name="death-pipe", daemon=True).start()
