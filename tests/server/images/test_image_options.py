"""The options of images, and what a model's files say of them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from server.cli.commands import plan
from server.cli.commands.serve import add_arguments, requested_config
from server.cli.config_file import NO_FILE
from server.cli.main import UsageError
from server.config import ServerConfig
from server.images.addresses import AllowedHosts
from server.images.limits import ImageLimits
from server.images.model_files import model_limits
from server.images.options import OptionError, check_pixels, images_per_prompt
from server.images.reader import ImageReader
from server.process.api_process import images_of
from server.process.report.unused_options import unused_image_options
from server.prompt.tokenizer import ChatTokenizer, TokenizerError
from tests.support.images.vision_server import PAD, TEMPLATE, WORDS
from tests.support.server.fake_engine import write_tokenizer

QWEN3: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN25: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "merge_size": 2,
}


def config_of(*options: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return requested_config(parser.parse_args(["tiny-chat", *options]), {}, NO_FILE)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("image=4", 4),
        ("image=4,video=0", 4),
        ('{"image": 7}', 7),
        ('{"image": 7, "video": 0, "audio": 0}', 7),
        ("image=0", 0),
        ("video=0", 16),
    ],
)
def test_the_limit_is_written_as_vllm_has_it(text: str, count: int) -> None:
    assert images_per_prompt(text) == count
    config = config_of("--limit-mm-per-prompt", text)
    assert config.limit_mm_per_prompt == text
    assert (config.engine.max_image_pixels == 0) == (count == 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--limit-mm-per-prompt", "4"), "write image=4"),
        (("--limit-mm-per-prompt", "image=-1"), "write image=4"),
        (("--limit-mm-per-prompt", "image=9999"), "at most 1024 images"),
        (("--limit-mm-per-prompt", "smell=4"), "write image=4"),
        (("--limit-mm-per-prompt", '{"image": "x"}'), "write image=4"),
        (("--limit-mm-per-prompt", "{"), "write image=4"),
        (("--limit-mm-per-prompt", "image=1,video=2"), "no model here reads video: use 0"),
        (("--image-urls", "https://a.com/"), "is no host: write names such as"),
        (("--max-image-pixels", "5000"), "choose from 65536 to 16777216"),
        (("--max-image-pixels", "1g"), "choose from 65536 to 16777216"),
    ],
)
def test_a_wrong_option_is_refused_before_the_start(options: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError) as caught:
        config_of(*options)
    assert words in str(caught.value) and options[0] in str(caught.value)


@pytest.mark.parametrize(
    ("options", "unused"),
    [
        ((), []),
        (("--image-urls", "any"), ["--image-urls"]),
        (("--limit-mm-per-prompt", "image=4"), ["--limit-mm-per-prompt"]),
        (("--limit-mm-per-prompt", "image=0"), []),  # it says that text alone is read
        (("--max-image-pixels", "2m"), ["--max-image-pixels"]),
    ],
)
def test_options_of_images_that_a_model_of_text_has_no_use_for_are_known(
    options: tuple[str, ...], unused: list[str]
) -> None:
    assert unused_image_options(config_of(*options)) == unused


@pytest.mark.parametrize("pixels", [1, 65_535, 16_777_217])
def test_pixels_that_no_model_takes_are_refused_to_the_plan_too(pixels: int) -> None:
    with pytest.raises(OptionError, match="--max-image-pixels"):
        check_pixels(pixels)
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    with pytest.raises(UsageError, match="choose from 65536 to 16777216"):
        plan.run(parser.parse_args(["--max-image-pixels", str(pixels)]))


def test_an_option_error_is_of_the_text_itself() -> None:
    with pytest.raises(OptionError, match="--limit-mm-per-prompt image=x"):
        images_per_prompt("image=x")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    return ChatTokenizer.load(write_tokenizer(folder, template=TEMPLATE, special=WORDS))


def write(folder: Path, tokenizer: ChatTokenizer, processor: object, name: str) -> Path:
    (folder / name).write_text(json.dumps(processor))
    id = tokenizer.tokenizer.token_to_id(PAD)
    (folder / "config.json").write_text(json.dumps({"image_token_id": id}))
    return folder


@pytest.mark.parametrize("processor", [QWEN3, QWEN25])
@pytest.mark.parametrize("nested", [False, True])
def test_files_are_read_as_the_library_reads_them(
    tmp_path: Path, tokenizer: ChatTokenizer, processor: dict[str, Any], nested: bool
) -> None:
    name = "processor_config.json" if nested else "preprocessor_config.json"
    inside = {"image_processor": processor, "processor_class": "X"} if nested else processor
    limits = model_limits(write(tmp_path, tokenizer, inside, name), tokenizer)
    library = Qwen2VLImageProcessorPil(**processor)
    assert limits is not None and limits.token == PAD
    assert (limits.patch_size, limits.merge_size) == (library.patch_size, library.merge_size)
    assert (limits.min_pixels, limits.max_pixels) == (
        library.size["shortest_edge"],
        library.size["longest_edge"],
    )


def test_a_file_without_sizes_has_those_of_the_library(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    """Those of transformers 5.23; earlier ones have a larger limit."""
    processor = {"image_processor_type": "Qwen2VLImageProcessor"}
    limits = model_limits(write(tmp_path, tokenizer, processor, "processor_config.json"), tokenizer)
    assert limits is not None
    assert (limits.patch_size, limits.merge_size) == (14, 2)
    assert (limits.min_pixels, limits.max_pixels) == (56 * 56, 28 * 28 * 1280)


@pytest.mark.parametrize(
    "processor",
    [
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}},
        {"image_processor_type": "CLIPImageProcessor", "size": 224, "patch_size": "x"},
        {"feature_extractor_type": "WhisperFeatureExtractor"},
        {},
        [],
    ],
)
def test_other_processors_are_none_that_is_known(
    tmp_path: Path, tokenizer: ChatTokenizer, processor: object
) -> None:
    folder = write(tmp_path, tokenizer, processor, "preprocessor_config.json")
    assert model_limits(folder, tokenizer) is None
    assert images_of(ServerConfig(), str(folder), tokenizer) is None


def test_files_that_cannot_be_used_are_named(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    write(tmp_path, tokenizer, QWEN3 | {"patch_size": 0}, "preprocessor_config.json")
    with pytest.raises(TokenizerError, match="cannot be used: "):
        model_limits(tmp_path, tokenizer)
    write(tmp_path, tokenizer, QWEN3, "preprocessor_config.json")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="has no image_token_id"):
        model_limits(tmp_path, tokenizer)


def test_the_options_narrow_what_the_model_reads(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    folder = str(write(tmp_path, tokenizer, QWEN3, "preprocessor_config.json"))

    def reader(*options: str) -> ImageReader:
        found = images_of(config_of(*options), folder, tokenizer)
        assert found is not None
        found.close()
        return found

    assert reader().limits == ImageLimits(token=PAD, max_pixels=4 << 20, max_images=16)
    assert reader().fetcher.allowed.none
    changed = reader(
        "--max-image-pixels",
        "1m",
        "--limit-mm-per-prompt",
        "image=2",
        "--image-urls",
        "a.com,b.com:81",
    )
    assert (changed.limits.max_pixels, changed.limits.max_images) == (1 << 20, 2)
    assert changed.fetcher.allowed == AllowedHosts.parse("a.com,b.com:81")
    assert reader("--max-image-pixels", "16m").limits.max_pixels == 16 << 20


def test_without_such_files_nothing_of_images_is_loaded(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "server.images.model_files", None)
    assert images_of(ServerConfig(), str(tmp_path), tokenizer) is None
    write(tmp_path, tokenizer, QWEN3, "preprocessor_config.json")
    for option in (("--max-image-pixels", "0"), ("--limit-mm-per-prompt", "image=0")):
        assert images_of(config_of(*option), str(tmp_path), tokenizer) is None
