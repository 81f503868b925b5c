"""Qwen3-VL: Qwen3's text model, and an encoder of images.

Where a step has tokens of images, their features take the place of embeddings, the first layers
add more of them to the hidden states, and the rope turns by triples of positions.  Any other step
is that of the text model alone.
"""

from __future__ import annotations

from torch import Tensor

from model_zoo.config import ModelConfig
from model_zoo.families.model_config import VISION_WEIGHTS
from model_zoo.inputs import ModelInput
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.normed_rows import NormedRows
from model_zoo.model import Weights
from model_zoo.models.llama import Llama
from model_zoo.vision.embed import ReadsImages, embed_with_images, features_of
from model_zoo.vision.encoder import VisionEncoder


class Qwen3VL(ReadsImages, Llama):
    def __init__(self, config: ModelConfig, linears: LinearFactory) -> None:
        super().__init__(config, linears)
        assert config.vision is not None
        self.vision = VisionEncoder(config.vision, linears.dtype)

    def forward(self, inp: ModelInput) -> Tensor:
        if inp.images is None:
            return super().forward(inp)
        images, index = inp.images, inp.images.index
        norms = [*(layer.attention_norm for layer in self.layers), self.norm]
        residual, cos_sin = embed_with_images(
            self.embedding, norms[0], self.rope, inp.tokens, images
        )
        x, residual = norms[0].add(None, residual)
        num_added = images.features.shape[1] - 1
        consumers = [*(layer.attention.qkv for layer in self.layers), None]
        following = zip(self.layers, norms[1:], consumers[1:], strict=True)
        for number, (layer, norm, consumer) in enumerate(following):
            logit_rows = inp.ends if layer is self.layers[-1] else None
            added, residual = layer(x, residual, inp, cos_sin, logit_rows)
            if logit_rows is not None:
                index = index.index_select(0, logit_rows)
            if number < num_added:
                residual = residual + features_of(images, 1 + number, index)
                if isinstance(added, NormedRows):  # of the sum without the features
                    added = None
            x, residual = norm.add(added, residual, consumer=consumer)
        return x

    def other_weights(self) -> Weights:
        return super().other_weights() | self.vision.weights(VISION_WEIGHTS)
