"""The directory of a server's sockets, and those that killed servers have left."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
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


def test_a_start_removes_the_directories_of_killed_servers_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", KILLED], env=environment, timeout=60, check=False)
    assert len(list(tmp_path.iterdir())) == 1, "the second one has removed that of the first"
    others = {tmp_path / f"wavefill-{name}" for name in ("of-an-older-version", "checkout")}
    for other in others:
        other.mkdir()
    (tmp_path / "wavefill-checkout" / LOCK).touch()  # which is no folder of a server
    with socket_directory() as one, socket_directory() as another:
        assert set(tmp_path.iterdir()) == {one, another, *others}
    assert set(tmp_path.iterdir()) == others


def test_a_folder_without_file_locks_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(LaunchError, match="No locks available: set TMPDIR"), socket_directory():
        pass
    assert not list(tmp_path.iterdir())
