"""The directory of a server's sockets, and those that killed servers have left."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.process.exclusive_files import LOCK, LaunchError, socket_directory

KILLED = """
import os, signal
from server.process.exclusive_files import socket_directory
with socket_directory() as directory:
    (directory / "metrics").mkdir()
    (directory / "metrics" / "counts").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """TMPDIR of this process: a short name, as names of sockets have to be."""
    with tempfile.TemporaryDirectory(prefix="wf") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_a_start_removes_the_directories_of_killed_servers_and_no_others(
    folder: Path,
):
    environment = {**os.environ, "TMPDIR": str(folder)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED], env=environment, timeout=60, check=False)
    assert len(list(folder.iterdir())) == 1, "the second one has removed that of the first"
    others = {folder / f"wavefill-{name}" for name in ("of-an-older-version", "checkout")}
    for other in others:
        other.mkdir()
    (folder / "wavefill-checkout" / LOCK).touch()  # which is no folder of a server
    with socket_directory() as one, socket_directory() as another:
        assert set(folder.iterdir()) == {one, another, *others}
    assert set(folder.iterdir()) == others


def test_a_folder_without_file_locks_is_refused_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(LaunchError, match="No locks available: set TMPDIR"), socket_directory():
        pass
    assert not list(folder.iterdir())
