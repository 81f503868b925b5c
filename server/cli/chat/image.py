"""An image file as a part of a message."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

MAX_BYTES = 16 << 20  # as base64 it has to fit into the body of a request (--max-body-bytes)
SIGNATURES = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
}


class ImageError(ValueError):
    """A file that cannot be sent; the message says what, the limit and the remedy."""


def image_part(name: str) -> dict[str, Any]:
    """The part of a message for a file or a URL, which the server reads.  Raises ImageError."""
    if name.startswith(("http://", "https://", "data:")):
        return {"type": "image_url", "image_url": {"url": name}}
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ImageError(f"{name} has over {MAX_BYTES >> 20} MiB: make the image smaller")
        data = path.read_bytes()
    except OSError as error:
        raise ImageError(f"{name}: {error.strerror}: give the file of an image") from None
    url = f"data:{media_type(name, data)};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def media_type(name: str, data: bytes) -> str:
    """By the first bytes, not by the name.  Raises ImageError."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    for signature, kind in SIGNATURES.items():
        if data.startswith(signature):
            return kind
    raise ImageError(f"{name} is no image that is known here: give a PNG, JPEG, GIF or WebP file")
