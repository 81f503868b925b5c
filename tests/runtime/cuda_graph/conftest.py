"""Where whole steps run, and the model that they run; executors whose graphs are names."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engine.fake_graphs import FakeExecutor
from tests.support.models.tiny_checkpoints import write_checkpoint


@pytest.fixture
def device(device: str) -> torch.device:
    return torch.device(device)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    return directory


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    return FakeExecutor(monkeypatch)


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> FakeExecutor:
    """Of a model that reads images."""
    return FakeExecutor(monkeypatch, reads_images=True)
