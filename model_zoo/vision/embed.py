"""A step's embeddings where some of its tokens are of images, and a model that reads images."""

from __future__ import annotations

import torch
from torch import Tensor

from model_zoo.inputs import StepImages
from model_zoo.layers.embedding import Embedding, embed
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Rope
from model_zoo.vision.encoder import VisionEncoder


class ReadsImages:
    """Of a model that has an image encoder beside its text model."""

    vision: VisionEncoder

    def encode(self, pixels: Tensor) -> Tensor:
        """As VisionEncoder.encode."""
        return self.vision.encode(pixels)


def embed_with_images(
    embedding: Embedding, norm: RMSNorm, rope: Rope, tokens: Tensor, images: StepImages
) -> tuple[Tensor, Tensor]:
    """-> embeddings [T, size], features of images in their places, and the rope's rows.

    Tokens of text go through what they go through without images, to the last bit.
    """
    _, residual, (cos_sin,) = embed(embedding, norm, [rope], tokens, images.positions[0])
    is_image = (images.index >= 0)[:, None]
    residual = torch.where(is_image, features_of(images, 0, images.index), residual)
    triples = rope.rows(images.positions, cos_sin.dtype)
    return residual, torch.where(is_image, triples, cos_sin)


def features_of(images: StepImages, number: int, index: Tensor) -> Tensor:
    """Features `number` of the tokens of rows `index` [T, hidden]; zeros for those of text."""
    found = images.features[:, number].index_select(0, index.clamp_min(0))
    return found.masked_fill((index < 0)[:, None], 0)
