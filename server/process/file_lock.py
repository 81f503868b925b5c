"""A lock file, for a resource that one process of a machine uses alone."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def file_lock(path: Path) -> Generator[bool]:
    """Whether the lock was free, and is held until the end of the block; does not wait.

    The file is made if there is none, and stays.  The kernel frees the lock when the process ends,
    however it ends.  Raises OSError.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
