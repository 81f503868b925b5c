"""The bytes of an image, wherever a request says that they are."""

from __future__ import annotations

import asyncio
import base64
import binascii
from dataclasses import dataclass

from server.batches.files import FileStore
from server.errors import NotFound
from server.generation.off_loop import off_loop
from server.images.fetch import ImageFetcher
from server.images.image_error import ImageError

MAX_IMAGE_BYTES = 20 << 20  # of one that a request brings or names; a fetched one: fetch.MAX_BYTES
DATA = "data:"
ANY_IMAGE = "image/*"  # of an API that has no place for the media type
MAX_MEDIA_TYPE = 128  # characters, with its parameters


@dataclass(frozen=True)
class ImageData:
    data: bytes
    declared: str = ""  # the media type that the caller says; "" if none


@dataclass(frozen=True)
class ImageSources:
    """Where the images of one request may come from."""

    fetcher: ImageFetcher
    files: FileStore | None  # None: files are off
    owner: bytes  # whose files the request may see

    async def read(self, url: str | None, file_id: str | None) -> ImageData:
        """One of the two is given.  Raises ImageError, NotFound for an unknown file."""
        if url is None:
            return await self._file(file_id or "")
        if url[: len(DATA)].lower() == DATA:
            return await off_loop(len(url), lambda: parse_data_url(url))
        return ImageData(await self.fetcher.fetch(url))

    async def _file(self, id: str) -> ImageData:
        files = self.files
        if files is None:
            raise ImageError(
                "names a file, and this server keeps none: send the image itself as a data URL "
                "(the operator can switch files on by --data-dir)",
                "source",
            )
        return await asyncio.to_thread(_read_file, files, self.owner, id)


def parse_data_url(url: str) -> ImageData:
    """Raises ImageError."""
    head, comma, text = url[len(DATA) :].partition(",")
    if not comma or len(head) > MAX_MEDIA_TYPE:
        raise ImageError(
            'is no valid data URL: it must begin as "data:image/png;base64,"', "source"
        )
    media_type, *options = (word.strip().lower() for word in head.split(";"))
    if "base64" not in options:
        raise ImageError("is a data URL without ;base64: encode the image as base64", "source")
    if not media_type.startswith("image/"):
        kind = media_type or "no media type"
        error = f"is a data URL of {kind[:60]}: send an image, such as image/png"
        raise ImageError(error, "format")
    check_length(len(text) * 3 // 4 - text[-2:].count("="))
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        error = "is not valid base64: encode all of the image's bytes anew"
        raise ImageError(error, "source") from None
    return ImageData(data, "" if media_type == ANY_IMAGE else media_type)


def check_length(num_bytes: int) -> None:
    """Raises ImageError for an image of too many bytes."""
    if num_bytes > MAX_IMAGE_BYTES:
        raise ImageError(
            f"has {num_bytes} bytes, an image may have {MAX_IMAGE_BYTES}: make it smaller",
            "size",
        )


def _read_file(files: FileStore, owner: bytes, id: str) -> ImageData:
    file = files.find(owner, id)
    check_length(file.bytes)
    try:
        return ImageData(files.path(file.id).read_bytes())
    except FileNotFoundError:  # deleted since
        raise NotFound("the file `{}` is gone", file.id, code="file_not_found") from None
