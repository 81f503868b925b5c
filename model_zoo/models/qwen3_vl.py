"""Qwen3-VL: Qwen3's text model, and an encoder of images.

Where a step has tokens of images, their features take the place of embeddings, the first layers
add more of them to the hidden states, and the rope turns by triples of positions.  Any other step
is that of the text model alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput, StepImages
from model_zoo.layers.embedding import embed
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.model import Weights
from model_zoo.models.llama import Llama
from model_zoo.vision.encoder import VisionEncoder


class Qwen3VL(Llama):
    def __init__(self, config: ModelConfig, linears: LinearFactory) -> None:
        super().__init__(config, linears)
        assert config.vision is not None
        self.vision = VisionEncoder(config.vision, linears.dtype)

    def encode(self, pixels: Tensor) -> Tensor:
        """As VisionEncoder.encode."""
        return self.vision.encode(pixels)

    def forward(self, inp: ModelInput) -> Tensor:
        if inp.images is None:
            return super().forward(inp)
        images, index = inp.images, inp.images.index
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        # Tokens of text go through what they go through without images, to the last bit.
        _, residual, (cos_sin,) = embed(
            self.embedding, norms[0], [self.rope], inp.tokens, images.positions[0]
        )
        is_image = (index >= 0)[:, None]
        residual = torch.where(is_image, _features(images, 0, index), residual)
        triples = self.rope.rows(images.positions, cos_sin.dtype)
        cos_sin = torch.where(is_image, triples, cos_sin)
        x, residual = norms[0].add(None, residual)
        num_added = images.features.shape[1] - 1
        for number, (layer, norm) in enumerate(zip(self.layers, norms[1:], strict=True)):
            logit_rows = inp.ends if layer is self.layers[-1] else None
            x, residual = layer(x, residual, inp, cos_sin, logit_rows)
            if logit_rows is not None:
                index = index.index_select(0, logit_rows)
            if number < num_added:
                residual = residual + _features(images, 1 + number, index)
            x, residual = norm.add(x, residual)
        return x

    def other_weights(self) -> Weights:
        return super().other_weights() | self.vision.weights("model.visual.")


def _features(images: StepImages, number: int, index: Tensor) -> Tensor:
    """Features `number` of tokens [T, hidden]; zeros for those of text."""
    found = images.features[:, number].index_select(0, index.clamp_min(0))
    return found.masked_fill((index < 0)[:, None], 0)
