"""ImageReader: what an API process has for a model that reads images; and what it holds of them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from runtime.messages import PromptImage
from server.generation.admission import full
from server.images.decoder import ImageDecoder
from server.images.fetch import ImageFetcher
from server.images.limits import ImageLimits
from server.images.source import ImageData

MAX_HELD_BYTES = 4 << 30  # of images of all open requests, as they came and decoded


class HeldPixels:
    """The decoded images of one request, which count until it ends."""

    def __init__(self, reader: ImageReader, num_bytes: int) -> None:
        """Raises RateLimited if others hold too much."""
        reader.hold(num_bytes)
        self.images: tuple[PromptImage, ...] = ()
        self._reader, self._num_bytes = reader, num_bytes

    def close(self) -> None:
        self.images = ()
        self._reader.release(self._num_bytes)
        self._num_bytes = 0


@dataclass
class ImageReader:
    """Belongs to one event loop."""

    limits: ImageLimits
    fetcher: ImageFetcher
    decoder: ImageDecoder = field(default_factory=ImageDecoder)
    held_bytes: int = 0  # of open requests

    @property
    def most_bytes(self) -> int:
        return MAX_HELD_BYTES

    def hold(self, num_bytes: int) -> None:
        """Count bytes until `release`.  Raises RateLimited if others hold too much."""
        if self.held_bytes and self.held_bytes + num_bytes > MAX_HELD_BYTES:
            raise full(
                "images_full",
                "images of open requests have {} bytes, {} more exceed the limit of {}: try again "
                "later",
                (self.held_bytes, num_bytes, MAX_HELD_BYTES),
            )
        self.held_bytes += num_bytes

    def release(self, num_bytes: int) -> None:
        self.held_bytes -= num_bytes

    def count(self, image: ImageData) -> None:
        """Count an image's bytes for as long as it is referred to.  Raises RateLimited."""
        self.hold(len(image.data))
        weakref.finalize(image, self.release, len(image.data))

    def close(self) -> None:
        self.decoder.close()
