"""Model: what all architectures share, and their interface to the loader and the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.attention import Attention
from model_zoo.layers.delta_net.block import DeltaNet
from model_zoo.layers.linear import Linear
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe.experts import Experts
from model_zoo.layers.norm import LayerNorm, RMSNorm
from model_zoo.layers.projection import Projection
from model_zoo.parallel.shard import Part

Weights = dict[str, Tensor]  # by name in the checkpoint


class Model(nn.Module, ABC):
    """Token embedding, blocks of one class and shape, final norm, LM head."""

    EMBEDDING = "model.embed_tokens.weight"  # its name in the checkpoint

    def __init__(
        self,
        config: ModelConfig,
        linears: LinearFactory,
        layer: Callable[[ModelConfig, int, LinearFactory], nn.Module],
        norm: Callable[[int, float, torch.dtype], RMSNorm | LayerNorm],
    ) -> None:
        super().__init__()
        self.config = config
        self._communicator = linears.communicator
        dtype = linears.dtype
        self.embedding = linears.embedding(
            config.vocab_size, config.hidden_size, scale=config.embedding_scale
        )
        self.layers = nn.ModuleList([layer(config, i, linears) for i in range(config.num_layers)])
        self.norm = norm(config.hidden_size, config.norm_eps, dtype)
        tied = self.embedding if config.tie_embeddings else None
        self.head = linears.head(config.vocab_size, config.hidden_size, "lm_head", tied)
        self.link_layers()

    def link_layers(self) -> None:
        """Tell the last GEMM of each of `layers` which norm follows it, and with which consumer."""

    @abstractmethod
    def forward(self, inp: ModelInput) -> Tensor:
        """Hidden states after the final norm: [R, hidden] at `inp.ends`, or [T, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, hidden] -> logits [R, vocab] in the weights' dtype, a new tensor."""
        logits = self._communicator.gather(self.head(hidden))
        if logits.shape[1] > self.config.vocab_size:  # rows of padding in the ranks' vocabularies
            logits = logits[:, : self.config.vocab_size].contiguous()
        cap = self.config.logit_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def shortened(self) -> AbstractContextManager[None]:
        """Run with the first two layers of each kind only, for work such as compiling kernels.

        Layers are of a kind if they have the same MLP, or experts, and the same attention.  Those
        that remain are linked to each other, so that kernels between two layers are compiled, too.
        """
        kinds: Counter[tuple[object, ...]] = Counter()
        few: list[nn.Module] = []
        for layer in self.layers:
            attention = getattr(layer, "attention", None)
            kind = type(getattr(layer, "mlp", layer)), getattr(attention, "spec", None)
            kinds[kind] += 1
            few += [layer] if kinds[kind] <= 2 else []
        return self._with(few)

    def first_layers(self, count: int) -> AbstractContextManager[None]:
        """Run with so many layers only: a step is as one of the whole model, but shorter."""
        return self._with(list(self.layers)[:count])

    @contextmanager
    def _with(self, layers: list[nn.Module]) -> Iterator[None]:
        """Run with these of its layers."""
        whole = self.layers
        self.layers = nn.ModuleList(layers)
        self.link_layers()
        try:
            yield
        finally:
            self.layers = whole
            self.link_layers()

    def projections(self) -> list[Projection]:
        """The checkpoint's linear layers, of which the Linears are made."""
        linears = [module for module in self.modules() if isinstance(module, Linear)]
        return [projection for linear in linears for projection in linear.projections()]

    def experts(self) -> list[Experts]:
        """The experts of all layers that have some."""
        return [module for module in self.modules() if isinstance(module, Experts)]

    def other_parts(self) -> dict[str, Part]:
        """What the rank has of those of `other_weights` that are divided, by their rows."""
        found: dict[str, Part | None] = {self.EMBEDDING: self.embedding.part}
        for module in self.modules():
            if isinstance(module, Attention | DeltaNet):
                found |= module.other_parts()
        return {name: part for name, part in found.items() if part is not None}

    @abstractmethod
    def other_weights(self) -> Weights:
        """Weights outside of Linears and experts: tensor name in the checkpoint -> parameter."""
