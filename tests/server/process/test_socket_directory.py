"""The directory of a server's sockets, and those that killed servers have left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from server.process.exclusive_files import socket_directory

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
    (tmp_path / "wavefill-of-an-older-version").mkdir()
    with socket_directory() as one, socket_directory() as other:
        assert set(tmp_path.iterdir()) == {one, other, tmp_path / "wavefill-of-an-older-version"}
    assert [path.name for path in tmp_path.iterdir()] == ["wavefill-of-an-older-version"]
