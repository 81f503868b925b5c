"""The images of one chat request: read, counted, placed among its tokens, decoded.

Counting needs the size of an image alone, so that a request which does not fit is refused before
anything is decoded, and routes that only count never decode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from runtime.messages import PromptImage
from server.apis.openai.chat_schema import ChatRequest, ImageUrl
from server.errors import FieldPath, MissingParameter, NotFound, RequestError
from server.http.request_context import current_owner, images_read
from server.images.image_error import ImageError
from server.images.reader import HeldPixels, ImageReader
from server.images.source import ImageData, ImageSources
from server.metrics.image_causes import ImageCause
from server.prompt.tokenizer import ChatTokenizer
from server.state import ServerState

MESSAGES = FieldPath("messages")
ROLES = ("user", "tool")
INVALID = "invalid_image"
T = TypeVar("T")


class CountRefused(Protocol):
    """Metrics.image_refused."""

    def __call__(self, cause: ImageCause, count: int = 1) -> None: ...


@dataclass(frozen=True)
class SizedImage:
    """An image whose size is known."""

    path: FieldPath
    data: ImageData
    width: int  # that the model sees, before it is turned upright
    height: int
    num_tokens: int


class RequestImages:
    def __init__(
        self, reader: ImageReader, images: Sequence[SizedImage], refused: CountRefused
    ) -> None:
        self._reader, self._images, self._refused = reader, images, refused
        self._starts: list[int] = []  # of each image in the prompt

    @property
    def num_tokens(self) -> int:
        return sum(image.num_tokens for image in self._images)

    @classmethod
    async def read(
        cls, state: ServerState, body: ChatRequest, found: Sequence[tuple[FieldPath, ImageUrl]]
    ) -> RequestImages:
        """Fetch the images that `body` has and look at their sizes.

        Raises RequestError that names the field of the first that cannot be used, RateLimited.
        """
        reader, refused = state.images, state.metrics.image_refused
        if reader is None:
            state.readable.check_field(found[0][0])
        assert reader is not None
        if len(found) > reader.limits.max_images:
            refused("count", len(found))
        _check(body, found, reader)
        files = None if state.batches is None else state.batches.files
        sources = ImageSources(reader.fetcher, files, current_owner())
        found_before = images_read.get()
        known: dict[Any, ImageData] = {} if found_before is None else found_before
        sized = [_sized(reader, sources, known, path, image, refused) for path, image in found]
        return cls(reader, await _all(sized), refused)

    def place(self, tokens: list[int], tokenizer: ChatTokenizer) -> list[int]:
        """The prompt with as many placeholders for each image as it has tokens.

        Raises RequestError if the template did not print one for each.
        """
        word = self._reader.limits.token
        placeholder = tokenizer.tokenizer.token_to_id(word)
        assert placeholder is not None, f"the tokenizer has no {word}"
        places = [place for place, token in enumerate(tokens) if token == placeholder]
        if len(places) > len(self._images):
            raise RequestError(
                "{} spells {}, which stands for an image: leave it out of the texts",
                (MESSAGES, word),
            )
        if len(places) < len(self._images):
            raise RequestError(
                "the model's chat template has places for {} of the {} images: put images into "
                "messages of role user",
                (len(places), len(self._images)),
                param=MESSAGES,
            )
        placed: list[int] = []
        self._starts, copied = [], 0
        for place, image in zip(places, self._images, strict=True):
            placed += tokens[copied:place]
            self._starts.append(len(placed))
            placed += [placeholder] * image.num_tokens
            copied = place + 1
        return placed + tokens[copied:]

    async def decode(self) -> HeldPixels:
        """The images as the engine takes them, which all answers share.

        Raises RequestError, RateLimited.
        """
        pixels = sum(3 * image.width * image.height for image in self._images)
        if pixels > self._reader.most_bytes:
            self._refused("size")
            raise RequestError(
                "{messages} has images of {} bytes of pixels, at most {} are taken: send fewer or "
                "smaller ones",
                (pixels, self._reader.most_bytes),
            )
        held = HeldPixels(self._reader, pixels)
        try:
            pairs = zip(self._images, self._starts, strict=True)
            held.images = tuple(await _all([self._decoded(*pair) for pair in pairs]))
        except BaseException:
            held.close()
            raise
        return held

    async def _decoded(self, image: SizedImage, start: int) -> PromptImage:
        try:
            result, pixels = await self._reader.decoder.pixels(
                image.data.data, image.width, image.height
            )
        except ImageError as error:
            self._refused(error.cause)
            raise _refused(image.path, error) from None
        return PromptImage(
            start, image.num_tokens, result.width, result.height, pixels, result.digest
        )


def _check(
    body: ChatRequest, found: Sequence[tuple[FieldPath, ImageUrl]], reader: ImageReader
) -> None:
    """The rules between images and other fields.  Raises RequestError."""
    most = reader.limits.max_images
    if len(found) > most:
        raise RequestError(
            "{messages} has {} images, at most {} are taken: send fewer (the operator can raise "
            "--limit-mm-per-prompt)",
            (len(found), most),
        )
    if body.truncate_prompt_tokens is not None:
        raise RequestError("{truncate_prompt_tokens} would cut images in two: leave it out")
    for path, image in found:
        role = body.messages[int(path[1])].role
        if role not in ROLES:
            raise RequestError(
                "{} is an image of role {}: images belong to the roles {}",
                (path, role, " and ".join(ROLES)),
            )
        if image.url is None and image.file_id is None:
            raise MissingParameter("{} is required: add it", path / "url")
        if image.url is not None and image.file_id is not None:
            raise RequestError(
                "{} and {} exclude each other: leave one of them out",
                (path / "url", path / "file_id"),
            )
    if body.continue_final_message and body.messages[-1].images():
        raise RequestError(
            "{continue_final_message} needs a final message of text alone: send its images before"
        )


async def _sized(
    reader: ImageReader,
    sources: ImageSources,
    known: dict[Any, ImageData],
    path: FieldPath,
    image: ImageUrl,
    refused: CountRefused,
) -> SizedImage:
    key = (image.url, image.file_id)
    path /= "file_id" if image.url is None else "url"
    try:
        data = known.get(key)
        if data is None:
            data = known[key] = await sources.read(image.url, image.file_id)
            reader.count(data)
        stored = await reader.decoder.size(data.data, data.declared)
        width, height = reader.limits.size(*stored, image.detail)
    except ImageError as error:
        refused(error.cause)
        raise _refused(path, error) from None
    except NotFound:
        refused("source")
        raise RequestError(
            "{} is {}, which is no file of yours: upload it to /v1/files first",
            (path, (image.file_id or "")[:64]),
            code="file_not_found",
        ) from None
    return SizedImage(path, data, width, height, reader.limits.num_tokens(width, height))


def _refused(path: FieldPath, error: ImageError) -> RequestError:
    return RequestError("{} {}", (path, error), code=INVALID)


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results, or the first failure in the order of `work`, when all have ended."""
    results = await asyncio.gather(*work, return_exceptions=True)
    failure = next((each for each in results if isinstance(each, BaseException)), None)
    if failure is None:
        return cast("list[T]", results)
    try:
        raise failure
    finally:
        del failure, results  # which its traceback would keep, and with them the images
