"""Options that were given and change nothing for what is served; the log warns of them."""

from __future__ import annotations

from runtime.config import MAX_IMAGE_PIXELS, EngineConfig
from server.config import ServerConfig

OPTIONS_OF_FILES = ("max_file_bytes", "max_data_bytes", "batch_concurrency")
OPTIONS_OF_STATES = ("snapshot_every", "snapshot_bytes", "state_dtype")
OPTIONS_OF_RANKS = ("disable_custom_all_reduce",)


def unused_file_options(config: ServerConfig) -> list[str]:
    """Those of files and batches, without a directory for them."""
    return [] if config.data_dir else _changed(config, ServerConfig(), OPTIONS_OF_FILES)


def unused_state_options(config: EngineConfig) -> list[str]:
    """Those of recurrent states, for a model that has none."""
    return _changed(config, EngineConfig(model=config.model), OPTIONS_OF_STATES)


def unused_rank_options(config: EngineConfig) -> list[str]:
    """Those of several ranks, for a model that one device has."""
    return _changed(config, EngineConfig(model=config.model), OPTIONS_OF_RANKS)


def unused_image_options(config: ServerConfig) -> list[str]:
    """Those of images, for a model of text."""
    text_wanted = config.engine.max_image_pixels == 0  # then no images are expected
    given = {
        "--image-urls": config.image_urls != "",
        "--limit-mm-per-prompt": config.limit_mm_per_prompt != ServerConfig().limit_mm_per_prompt
        and not text_wanted,
        "--max-image-pixels": config.engine.max_image_pixels not in (0, MAX_IMAGE_PIXELS),
    }
    return [name for name, changes in given.items() if changes]


def _changed(config: object, default: object, names: tuple[str, ...]) -> list[str]:
    changed = (name for name in names if getattr(config, name) != getattr(default, name))
    return ["--" + name.replace("_", "-") for name in changed]
