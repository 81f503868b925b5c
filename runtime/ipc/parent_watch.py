"""A child's side of its parent: the first line of stdin is an order, the end of stdin a death."""

from __future__ import annotations

import os
import signal
import threading
from typing import TypeVar

import msgspec

ORPHANED = 3  # exit code

ArgsT = TypeVar("ArgsT")


def begin(kind: type[ArgsT]) -> ArgsT:
    """What the parent wants started, one line of JSON.  From then on this process ends with it."""
    # Ctrl-C in a terminal reaches the whole process group; the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):  # without a buffer: a thread will read on
        part = os.read(0, 1)
        if not part:
            raise SystemExit(ORPHANED)
        line += part
    start = msgspec.json.decode(line, type=kind)
    threading.Thread(target=_end_with_parent, name="death-pipe", daemon=True).start()
    return start


def _end_with_parent() -> None:
    """End this process at once when stdin ends, whatever its main thread is doing."""
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)
