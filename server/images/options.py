"""The options of images: their values read and checked."""

from __future__ import annotations

import re

import msgspec
from msgspec.structs import replace

from server.config import ServerConfig
from server.images.addresses import AllowedHosts

MIN_PIXELS = 65_536  # what models enlarge images to
MAX_PIXELS = 16 << 20  # what models are trained with at most
DEFAULT_IMAGES = 16  # of a request, unless the operator says otherwise
MAX_IMAGES = 1024
KINDS = ("image", "video", "audio")  # of which only images are read


class OptionError(ValueError):
    """The message is for the operator."""


def check_options(config: ServerConfig) -> None:
    """Raises OptionError."""
    images_per_prompt(config.limit_mm_per_prompt)
    try:
        AllowedHosts.parse(config.image_urls)
    except ValueError as error:
        raise OptionError(f"--image-urls {config.image_urls}: {error}") from None
    check_pixels(config.engine.max_image_pixels)


def check_pixels(pixels: int) -> None:
    """Raises OptionError for a value of --max-image-pixels that no model takes."""
    if pixels and not MIN_PIXELS <= pixels <= MAX_PIXELS:
        raise OptionError(
            f"--max-image-pixels {pixels}: choose from {MIN_PIXELS} to {MAX_PIXELS}, such as 4m, "
            "or 0 to serve the text model alone"
        )


def without_unused_encoder(config: ServerConfig) -> ServerConfig:
    """If requests may have no image, the engine does not load what reads them."""
    if images_per_prompt(config.limit_mm_per_prompt):
        return config
    return replace(config, engine=replace(config.engine, max_image_pixels=0))


def images_per_prompt(text: str) -> int:
    """Of the value of --limit-mm-per-prompt: image=4, or {"image": 4}.  Raises OptionError."""
    counts: dict[str, int] = {}
    try:
        if text.lstrip().startswith("{"):
            counts = msgspec.json.decode(text, type=dict[str, int])
        else:
            pairs = re.findall(r"(\w+)=([0-9]{1,9})(?:,|$)", text)
            counts = {kind: int(count) for kind, count in pairs}
            whole = ",".join(f"{kind}={count}" for kind, count in pairs)
            counts = counts if whole == text else {text: 0}
    except msgspec.DecodeError:
        counts = {text: 0}
    if not counts.keys() <= set(KINDS) or not 0 <= counts.get("image", 0) <= MAX_IMAGES:
        raise OptionError(
            f'--limit-mm-per-prompt {text}: write image=4, or {{"image": 4}}; at most '
            f"{MAX_IMAGES} images"
        )
    for kind in KINDS[1:]:
        if counts.get(kind):
            raise OptionError(f"--limit-mm-per-prompt {text}: no model here reads {kind}: use 0")
    return counts.get("image", DEFAULT_IMAGES)
