"""Image encoders whose small images are padded, and graphs that are replayed without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.encoder.encoder_attention import encoder_attention
from model_zoo.loader import fill_randomly
from model_zoo.vision import blocks
from model_zoo.vision.encoder import VisionEncoder
from model_zoo.vision.vision_config import VisionConfig
from runtime.cuda_graph import encoder_graphs
from runtime.cuda_graph.pool import GraphPool

TINY = VisionConfig(
    depth=3, hidden_size=128, intermediate_size=80, num_heads=2, out_size=64, patch_size=16,
    merge_size=2, frames=2, positions=8, deepstack_layers=(0, 2),
)  # fmt: skip
PUBLISHED = VisionConfig(  # but for its depth
    depth=4, hidden_size=1152, intermediate_size=4304, num_heads=16, out_size=4096, patch_size=16,
    merge_size=2, frames=2, positions=48, deepstack_layers=(0, 2),
)  # fmt: skip


def random_encoder(
    config: VisionConfig, device: torch.device, dtype: torch.dtype = torch.float32
) -> VisionEncoder:
    torch.manual_seed(3)
    with device:
        encoder = VisionEncoder(config, dtype)
    fill_randomly(encoder)
    return encoder


class InterpretedEncoderGraph:
    """Stands for a captured graph: queues the same again, and writes the outputs that it has."""

    def __init__(self, run: Callable[[], Tensor], features: Tensor) -> None:
        self._run, self._features = run, features
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self._features.copy_(self._run())


class InterpretedPool(GraphPool):
    """Of a CPU.  captures: how many succeed"""

    def __init__(self, captures: int = 1000) -> None:
        super().__init__(torch.device("cpu"))
        self.captures = captures
        self.renewals = 0

    def record(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        if not self.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captures -= 1
        features = run()
        return InterpretedEncoderGraph(run, features), features

    def renew(self) -> None:
        self.renewals += 1


def read_lengths_on_device(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """On a CPU the plain kernel is interpreted, and outputs of graphs are tensors of their own."""
    if device.type == "cpu":
        kernel = partial(encoder_attention, kernel="varlen")
        monkeypatch.setattr(blocks, "encoder_attention", kernel)
        monkeypatch.setattr(encoder_graphs, "alias", lambda tensor: tensor)


def pool_of(device: torch.device) -> GraphPool:
    return InterpretedPool() if device.type == "cpu" else GraphPool(device)
