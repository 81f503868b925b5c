"""ImageError: an image that cannot be used."""

from __future__ import annotations


class ImageError(ValueError):
    """The message goes on after the name of the field: "has no bytes: send the whole file"."""
