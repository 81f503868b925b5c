"""ImageLimits: what the loaded model reads of an image, and how many tokens one takes.

The sizes are those of transformers' Qwen2VLImageProcessor (`smart_resize`), which Qwen2-VL,
Qwen2.5-VL, Qwen3-VL and their successors are trained with: sides are multiples of a factor, and an
image keeps its number of pixels, within two bounds, rather than its exact proportions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from server.apis.openai.chat_schema import ImageDetail
from server.images.image_error import ImageError
from server.images.options import DEFAULT_IMAGES

MAX_PIXELS = 4 << 20  # of an image that the model sees, unless the operator says otherwise
LOW_PIXELS = 512 * 512  # with detail low
MEDIA_TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif", "image/bmp"]
MAX_ASPECT = 200  # times that one side may be longer than the other


@dataclass(frozen=True)
class ImageLimits:
    """All sizes are in pixels."""

    token: str  # the special token that the chat template prints once for an image
    patch_size: int = 16  # side of what becomes one row of the vision model
    merge_size: int = 2  # a token is of so many patches to each side
    min_pixels: int = 65_536  # smaller images are enlarged
    max_pixels: int = MAX_PIXELS  # larger images are scaled down
    max_images: int = DEFAULT_IMAGES  # of one request

    @property
    def factor(self) -> int:
        """Side of what becomes one token."""
        return self.patch_size * self.merge_size

    def description(self) -> dict[str, object]:
        """What clients are to know of it."""
        return {
            "max_images": self.max_images,
            "max_pixels": self.max_pixels,
            "max_tokens": self.max_pixels // self.factor**2,
            "media_types": MEDIA_TYPES,
        }

    def size(self, width: int, height: int, detail: ImageDetail | None = None) -> tuple[int, int]:
        """Width and height that the model sees of an image.

        Raises ImageError if one side is too many times the other.
        """
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ImageError(
                f"is {width} x {height} pixels: one side may be at most {MAX_ASPECT} times the "
                "other; cut it",
                "size",
            )
        most = min(self.max_pixels, LOW_PIXELS) if detail == "low" else self.max_pixels
        return fitted(width, height, self.factor, self.min_pixels, most)

    def num_tokens(self, width: int, height: int) -> int:
        """Of an image of a size that `size` returned."""
        return (width // self.factor) * (height // self.factor)

    def grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of patches of such an image."""
        return height // self.patch_size, width // self.patch_size


def fitted(width: int, height: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """The sides as multiples of `factor`, so that the pixels are between `least` and `most`.

    Python's round, which takes halves to even numbers, is part of the definition.
    """
    new_width, new_height = (round(side / factor) * factor for side in (width, height))
    if new_width * new_height > most:
        shrink = math.sqrt(width * height / most)
        new_width, new_height = (
            max(factor, math.floor(side / shrink / factor) * factor) for side in (width, height)
        )
    elif new_width * new_height < least:
        grow = math.sqrt(least / (width * height))
        new_width, new_height = (
            math.ceil(side * grow / factor) * factor for side in (width, height)
        )
    return new_width, new_height
