"""A client of an engine that the test plays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from runtime.ipc.channel import Receiver, Sender
from runtime.ipc.client import ClientNotifier, EngineClient
from runtime.messages import ToEngine
from tests.support.engine.played_engine import PlayedEngine, addresses


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[PlayedEngine]:
    own = f"ipc://{tmp_path}/api-2"
    decoder = msgspec.msgpack.Decoder(ToEngine)
    played = PlayedEngine(
        Receiver(f"ipc://{tmp_path}/engine", decoder), Sender(own), ClientNotifier([own])
    )
    yield played
    played.receiver.close()
    played.sender.close()
    played.notifier.close()


@pytest.fixture
async def client(tmp_path: Path, engine: PlayedEngine) -> AsyncIterator[EngineClient]:
    client = EngineClient(2, [addresses(tmp_path)])
    await client.start()
    yield client
    client.close()
