"""What a server has to itself: the directory of its sockets, with the files in which its API
processes count, and the file of --response-store."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Generator
from pathlib import Path

from server.config import ServerConfig
from server.metrics.shared_files import reserve
from server.process.file_lock import file_lock

# The kernel takes 107 for a socket's whole path, the longest being grammar-12345678/engine in here.
MAX_DIRECTORY_BYTES = 83
PREFIX = "wavefill-"
LOCK = "server.lock"


class LaunchError(OSError):
    """What the server has to itself is unusable; the message says why."""


@contextlib.contextmanager
def socket_directory() -> Generator[Path]:
    """A directory that only this user can enter, gone at the end.  Raises LaunchError.

    It has a lock, so that a later server removes it if this one is killed.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True)
    except OSError as error:
        raise LaunchError(
            f"{tempfile.tempdir or 'TMPDIR'}: {error.strerror}: set TMPDIR to a folder that this "
            "user may write to"
        ) from None
    with made as name:
        if len(name.encode()) > MAX_DIRECTORY_BYTES:
            raise LaunchError(
                f"{name}: {len(name.encode())} bytes, at most {MAX_DIRECTORY_BYTES} fit into the "
                "name of a socket: set TMPDIR to a shorter path, such as /tmp"
            )
        directory = Path(name)
        _remove_left(directory.parent)
        with contextlib.ExitStack() as stack:
            # Named when it is held: a file of this name without a lock is that of a dead server.
            new = directory / f"{LOCK}.new"
            try:
                stack.enter_context(file_lock(new))
                new.rename(directory / LOCK)
            except OSError as error:
                raise LaunchError(
                    f"{new}: {error.strerror}: set TMPDIR to a folder with room, on a disk that "
                    "has file locks"
                ) from None
            yield directory


def _remove_left(parent: Path) -> None:
    """The directories of this user's servers that were killed."""
    for left in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or removed meanwhile
            if _is_of_a_server(left):
                with file_lock(left / LOCK) as is_free:
                    if is_free:
                        shutil.rmtree(left, ignore_errors=True)


def _is_of_a_server(directory: Path) -> bool:
    """Whether it is as `socket_directory` makes them, and not the user's own folder of such a name.

    Raises OSError.
    """
    status = directory.lstat()
    made = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    return made and status.st_uid == os.getuid() and (directory / LOCK).is_file()


def reserve_metrics(folder: Path, config: ServerConfig) -> None:
    """The files in which several API processes count.  Raises LaunchError."""
    try:
        reserve(folder, config.api_workers, config.served_names[0])
    except OSError as error:
        raise LaunchError(
            f"{folder}: {error.strerror}: the metrics of --api-workers {config.api_workers} take "
            f"about {config.api_workers * 2} MB here: make room, or set TMPDIR to another folder"
        ) from None


@contextlib.contextmanager
def store_lock(file: str) -> Generator[None]:
    """Keeps other servers out of the file of --response-store; nothing if it is "".

    A server that opens the file marks as failed what is still being made in it: the responses that
    its own processes were making when they ended, if no other server is at work there.
    Raises LaunchError.
    """
    with contextlib.ExitStack() as stack:
        if file:
            try:
                held = stack.enter_context(file_lock(Path(f"{os.path.realpath(file)}.lock")))
            except OSError as error:
                raise LaunchError(
                    f"--response-store {file}: {error.strerror}: choose a file that this user may "
                    "write, in a directory that this user may write to"
                ) from None
            if not held:
                raise LaunchError(
                    f"--response-store {file}: another server uses this file: stop it, or give "
                    "each server a file of its own"
                )
        yield
