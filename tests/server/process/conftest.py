"""Launchers with a stub engine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.server.launched_server import LaunchedServer, Start, assert_all_end
from tests.support.server.server_process import free_port


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts launchers with a stub engine; nothing of them is left at the end of a test."""
    started: list[LaunchedServer] = []

    def launch(
        mode: str = "",
        drain_seconds: float = 20.0,
        api_workers: int = 1,
        store: str = "",
        drain_delay: float = 0.0,
        stdin: int | None = None,
        **variables: str,
    ) -> LaunchedServer:
        # The name of a socket has room for a short directory only.
        port, log, sockets = free_port(), tmp_path / "log", Path(tempfile.mkdtemp(prefix="s-"))
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.support.server.stub_launcher"),
                    *map(str, (port, drain_seconds, api_workers, store, drain_delay)),
                ],
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "STUB_ENGINE": mode,
                    "PYTHONPATH": str(ROOT),
                    "TMPDIR": str(sockets),
                    **variables,
                },
                start_new_session=True,
            )
        started.append(LaunchedServer(process, f"http://127.0.0.1:{port}", log, sockets))
        return started[-1]

    yield launch
    for launched in started:
        family = launched.children() if launched.process.poll() is None else []
        launched.process.kill()
        launched.process.wait(5)
        assert_all_end(family, 5)
        shutil.rmtree(launched.folder)
