"""ImageError: an image that cannot be used."""

from __future__ import annotations

from server.metrics.image_causes import ImageCause


class ImageError(ValueError):
    """The message goes on after the name of the field: "has no bytes: send the whole file"."""

    def __init__(self, message: str, cause: ImageCause) -> None:
        super().__init__(message)
        self.cause: ImageCause = cause
