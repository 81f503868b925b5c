"""Model: what all architectures share, and their interface to the loader and the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.embedding import Embedding, LMHead
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.weights import Weights


class Model(nn.Module, ABC):
    """Token embedding, blocks of one class and shape, final norm, LM head."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        layer: Callable[[ModelConfig, int, torch.dtype], nn.Module],
        norm: type[RMSNorm] | type[LayerNorm],
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = nn.ModuleList([layer(config, i, dtype) for i in range(config.num_layers)])
        self.norm = norm(config.hidden_size, config.norm_eps, dtype)
        tied = self.embedding if config.tie_embeddings else None
        self.head = LMHead(config.vocab_size, config.hidden_size, dtype, tied)

    @abstractmethod
    def forward(self, inp: ModelInput) -> Tensor:
        """Hidden states after the final norm: [R, hidden] at `inp.ends`, or [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab] in the weights' dtype, a new tensor."""
        return self.head(hidden)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Run with the first two layers only, for work such as compilation of kernels."""
        whole, self.layers = self.layers, self.layers[:2]
        try:
            yield
        finally:
            self.layers = whole

    @abstractmethod
    def weights(self) -> Weights:
        """Checkpoint tensor name -> the parameter, or a slice of one, that it fills."""
