"""What a model's files say of the images that it reads."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from server.config import ServerConfig
from server.images.addresses import AllowedHosts
from server.images.fetch import ImageFetcher
from server.images.limits import ImageLimits
from server.images.options import images_per_prompt
from server.images.reader import ImageReader
from server.loaded_model import PROCESSOR_FILES
from server.prompt.tokenizer import ChatTokenizer, TokenizerError

KNOWN = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
# Of these classes, where the file has no value.
PATCH_SIZE, MERGE_SIZE, MIN_PIXELS, MAX_PIXELS = 14, 2, 56 * 56, 28 * 28 * 1280
log = logging.getLogger(__name__)
T = TypeVar("T", bound=Struct)
Size = Annotated[int, Meta(ge=1)]


class PixelBounds(Struct, frozen=True):
    shortest_edge: Size | None = None  # both are numbers of pixels, whatever they are called
    longest_edge: Size | None = None


class ImageProcessor(Struct, frozen=True):
    patch_size: Size = PATCH_SIZE
    merge_size: Size = MERGE_SIZE
    size: PixelBounds = PixelBounds()
    min_pixels: Size | None = None
    max_pixels: Size | None = None


class ProcessorKind(Struct, frozen=True):
    """The type alone: the other fields of a type that is not known may be anything."""

    image_processor_type: str = ""
    image_processor: msgspec.Raw = msgspec.Raw()  # newer files have it all in here


class ModelFile(Struct, frozen=True):
    image_token_id: int | None = None


def image_reader(
    config: ServerConfig, directory: str, tokenizer: ChatTokenizer
) -> ImageReader | None:
    """None: the files describe no image processor that is known here.

    Raises TokenizerError for files that cannot be used.
    """
    limits = model_limits(Path(directory), tokenizer)
    if limits is None:
        return None
    limits = replace(
        limits,
        max_pixels=max(limits.min_pixels, min(limits.max_pixels, config.engine.max_image_pixels)),
        max_images=images_per_prompt(config.limit_mm_per_prompt),
    )
    return ImageReader(limits, ImageFetcher(AllowedHosts.parse(config.image_urls)))


def model_limits(folder: Path, tokenizer: ChatTokenizer) -> ImageLimits | None:
    """Those that the model is trained with.  Raises TokenizerError."""
    found = next((raw for name in PROCESSOR_FILES if (raw := _known(folder / name))), None)
    if found is None:
        return None
    path, raw = found
    processor = _decoded(path, raw, ImageProcessor)
    model = folder / "config.json"
    token_id = _decoded(model, model.read_bytes(), ModelFile).image_token_id
    token = None if token_id is None else tokenizer.tokenizer.id_to_token(token_id)
    if token is None:
        raise TokenizerError(f"{model} has no image_token_id that the tokenizer knows: correct it")
    return ImageLimits(
        token=token,
        patch_size=processor.patch_size,
        merge_size=processor.merge_size,
        min_pixels=processor.min_pixels or processor.size.shortest_edge or MIN_PIXELS,
        max_pixels=processor.max_pixels or processor.size.longest_edge or MAX_PIXELS,
    )


def _known(path: Path) -> tuple[Path, bytes] | None:
    """The JSON of an image processor of a type that is known here."""
    try:
        raw = path.read_bytes()
        kind = msgspec.json.decode(raw, type=ProcessorKind)
        if raw_inside := bytes(kind.image_processor):
            raw, kind = raw_inside, msgspec.json.decode(raw_inside, type=ProcessorKind)
    except OSError:
        return None
    except msgspec.DecodeError as error:
        log.warning("%s is not read: %s", path, error)
        return None
    return (path, raw) if kind.image_processor_type in KNOWN else None


def _decoded(path: Path, raw: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.DecodeError as error:
        raise TokenizerError(f"{path} cannot be used: {error}: correct it") from None
