"""Pixels of an image as the rows that Qwen's vision models take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PatchSpec:
    """Of a model's preprocessor_config.json."""

    patch_size: int = 16
    merge_size: int = 2
    frames: int = 2  # of a patch; an image stands in each of them
    mean: Sequence[float] = (0.5, 0.5, 0.5)
    std: Sequence[float] = (0.5, 0.5, 0.5)

    @property
    def values(self) -> int:
        """Of one row."""
        return 3 * self.frames * self.patch_size**2


def image_patches(pixels: Tensor, spec: PatchSpec) -> Tensor:
    """Normalized patches of an RGB image, a row each.

    pixels    uint8 [height, width, 3]; the sides are multiples of patch_size * merge_size
    Returns   float32 [height / patch_size * width / patch_size, spec.values], on the same device

    Rows go by squares of merge_size x merge_size patches, which become one token; within one by
    its rows, then its columns.  The values of a row are of (channel, frame, y, x).
    Source: transformers' Qwen2VLImageProcessor.
    """
    height, width, channels = pixels.shape
    patch, merge = spec.patch_size, spec.merge_size
    rows, columns = height // (patch * merge), width // (patch * merge)
    assert channels == 3 and (rows * patch * merge, columns * patch * merge) == (height, width)
    # Mean and deviation as numbers: as tensors, their copy to a GPU would wait for it.
    shares = (pixels.float() / 255).unbind(-1)
    scales = zip(shares, spec.mean, spec.std, strict=True)
    values = torch.stack([(share - mean) / std for share, mean, std in scales], -1)
    squares = values.view(rows, merge, patch, columns, merge, patch, 3)
    squares = squares.permute(0, 3, 1, 4, 6, 2, 5)  # [rows, columns, merge, merge, 3, patch, patch]
    frames = squares.unsqueeze(5).expand(-1, -1, -1, -1, -1, spec.frames, -1, -1)
    return frames.reshape(rows * columns * merge**2, spec.values)
