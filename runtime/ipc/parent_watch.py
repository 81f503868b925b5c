"""A child process reads its arguments from stdin, and exits when its parent closes stdin."""

from __future__ import annotations

import os
import signal
import threading
from typing import TypeVar

import msgspec

ORPHANED = 3  # exit code

ArgsT = TypeVar("ArgsT")


def read_args(kind: type[ArgsT]) -> ArgsT:
    """Read the arguments, one line of JSON; from then on this process exits with its parent."""
    # Ctrl-C in a terminal reaches the whole process group; the launcher decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = bytearray()
    while not line.endswith(b"\n"):  # unbuffered: the thread below reads on
        byte = os.read(0, 1)
        if not byte:
            raise SystemExit(ORPHANED)
        line += byte
    args = msgspec.json.decode(line, type=kind)
    threading.Thread(target=_exit_with_parent, name="death-pipe", daemon=True).start()
    return args


def _exit_with_parent() -> None:
    """Exit at once when stdin ends, whatever the main thread is doing."""
    while os.read(0, 4096):
        pass
    os._exit(ORPHANED)
