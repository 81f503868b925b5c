"""Model: what every architecture offers the loader and the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from model_zoo.inputs import ModelInput
from model_zoo.weights import Weights


class Model(nn.Module, ABC):
    @abstractmethod
    def forward(self, inp: ModelInput) -> Tensor:
        """Hidden states [T, hidden] of all tokens, after the last norm."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] of the weights' type, a tensor of its own."""

    @abstractmethod
    def weights(self) -> Weights:
        """A checkpoint's tensor name -> the (part of a) parameter that it fills."""
