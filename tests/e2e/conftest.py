"""Fixtures that start the real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.server.server_process import Server, start_server, stop_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server with the built-in model, shared by all tests that leave it as it was."""
    server = start_server(tmp_path_factory.mktemp("server") / "log")
    yield server
    stop_server(server)


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts servers that a test may kill; they are gone at its end."""
    started: list[Server] = []

    def start(*arguments: str) -> Server:
        started.append(start_server(tmp_path / f"log{len(started)}", *arguments))
        return started[-1]

    yield start
    for server in started:
        stop_server(server)
