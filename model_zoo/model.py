"""Model: the interface of every architecture to the loader and the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from model_zoo.inputs import ModelInput
from model_zoo.weights import Weights


class Model(nn.Module, ABC):
    layers: nn.ModuleList  # blocks of one class and shape

    @abstractmethod
    def forward(self, inp: ModelInput) -> Tensor:
        """Hidden states after the final norm: [R, hidden] at `inp.ends`, or [T, hidden]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab] in the weights' dtype, a new tensor."""

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
