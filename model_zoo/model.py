"""Model: what every architecture offers the loader and the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from model_zoo.inputs import ModelInput
from model_zoo.weights import Weights


class Model(nn.Module, ABC):
    layers: nn.ModuleList  # blocks of one kind and shape

    @abstractmethod
    def forward(self, inp: ModelInput) -> Tensor:
        """Hidden states after the last norm: [R, hidden] of `inp.ends`, or [T, hidden] of all."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] of the weights' type, a tensor of its own."""

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """With its first two layers alone: for what has to be done once, such as compiling."""
        whole, self.layers = self.layers, self.layers[:2]
        try:
            yield
        finally:
            self.layers = whole

    @abstractmethod
    def weights(self) -> Weights:
        """A checkpoint's tensor name -> the (part of a) parameter that it fills."""
