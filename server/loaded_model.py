"""LoadedModel: the model's files in an API process, which answers before it has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.messages import DOWNLOAD, Progress
from server.engine import Engine
from server.errors import Unavailable
from server.prompt.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from server.images.reader import ImageReader

# What is done until the server is ready, by the names of the phases; in the order of a start on a
# GPU, of which a CPU has a part.
PHASES = {
    DOWNLOAD: "downloading",
    "starting": "starting",
    "device": "initializing the device",
    "model": "allocating the weights",
    "kernels": "compiling kernels",
    "weights": "loading weights",
    "gemms": "choosing kernels",
    "memory": "measuring memory",
    "warm-up": "warming up",
    "graphs": "capturing graphs",
}
MAX_RETRY_SECONDS = 30
# In the directories of models that read images, and sometimes of others.
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class LoadedModel:
    """The tokenizer, the directory and what reads its images, which are set once."""

    def __init__(
        self,
        tokenizer: ChatTokenizer | None = None,
        directory: str = "",
        images: ImageReader | None = None,
    ) -> None:
        """images: None: the model's files describe no images"""
        self.tokenizer = tokenizer
        self.directory = directory
        self.images = images

    def set(
        self, tokenizer: ChatTokenizer, directory: str, images: ImageReader | None = None
    ) -> None:
        self.tokenizer, self.directory, self.images = tokenizer, directory, images


def loading(client: Engine) -> Unavailable:
    """The answer to requests until the model is loaded."""
    progress = client.progress
    left = progress.seconds_left if progress is not None else None
    return Unavailable(
        "the model is not loaded yet ({}): try again soon",
        "starting" if progress is None else progress_text(progress),
        code="loading",
        retry_after_s=2 if left is None else max(2, min(left, MAX_RETRY_SECONDS)),
    )


def progress_text(progress: Progress) -> str:
    """Such as `downloading 62 %, 40 s left`."""
    text = PHASES.get(progress.phase, progress.phase)
    if progress.total > 1:
        text += f" {100 * progress.done // progress.total} %"
    if progress.seconds_left is not None:
        text += f", {progress.seconds_left} s left"
    return text
