"""Fixtures of the server with a scripted engine.

A test file whose model needs another template redefines `shared`; the others follow it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.server.batch_server import BatchServer, batch_server
from tests.support.server.fake_engine import FakeServer, fake_server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """One for all tests of a file: training its tokenizer takes longer than they do."""
    with fake_server(tmp_path_factory.mktemp("tokenizer")) as server:
        yield server


@pytest.fixture
def fake(shared: FakeServer, caplog: pytest.LogCaptureFixture) -> Iterator[FakeServer]:
    """One test's: as it was made, whatever the test does with it, and no error in the log."""
    yield shared
    shared.reset()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.fixture(scope="module")
def http(shared: FakeServer) -> Iterator[httpx.Client]:
    """Connected once for all tests of a file, for those that leave the server as it is."""
    with httpx.Client(base_url=shared.url, timeout=60) as client:
        yield client


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    """One test's server with files and batches, called without a socket."""
    async with batch_server(tmp_path) as server:
        yield server
