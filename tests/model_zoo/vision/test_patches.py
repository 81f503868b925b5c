"""Pixels as rows of patches: those of transformers' processor, but for the rounding of floats."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from model_zoo.vision.patches import PatchSpec, image_patches
from server.images.decode_worker import DecodeArgs
from server.images.decoder import DecodeProcess
from server.images.limits import ImageLimits
from tests.support.images.pictures import encoded, noise

QWEN3 = PatchSpec()
QWEN25 = PatchSpec(patch_size=14, mean=tuple(OPENAI_CLIP_MEAN), std=tuple(OPENAI_CLIP_STD))
LIMITS = {
    QWEN3: ImageLimits(token="<|image_pad|>", max_pixels=1 << 19),
    QWEN25: ImageLimits(token="<|image_pad|>", patch_size=14, min_pixels=3136, max_pixels=1 << 19),
}


@pytest.fixture(scope="module")
def process() -> Iterator[DecodeProcess]:
    process = DecodeProcess()
    yield process
    process.end()


def library(spec: PatchSpec) -> Qwen2VLImageProcessorPil:
    limits = LIMITS[spec]
    return Qwen2VLImageProcessorPil(
        patch_size=spec.patch_size,
        merge_size=spec.merge_size,
        temporal_patch_size=spec.frames,
        image_mean=list(spec.mean),
        image_std=list(spec.std),
        size={"shortest_edge": limits.min_pixels, "longest_edge": limits.max_pixels},
    )


@pytest.mark.parametrize("size", [(64, 64), (1, 1), (17, 300), (640, 480), (1300, 900), (999, 61)])
@pytest.mark.parametrize("spec", [QWEN3, QWEN25], ids=["qwen3", "qwen2.5"])
def test_a_picture_becomes_the_rows_of_transformers(
    process: DecodeProcess, spec: PatchSpec, size: tuple[int, int]
) -> None:
    picture, limits = noise(*size), LIMITS[spec]
    expected = library(spec)(picture, return_tensors="np")
    width, height = limits.size(*size)
    data = encoded(picture)
    result, raw = process.ask(DecodeArgs(len(data), "image/png", width, height), data, 20)
    pixels = np.frombuffer(raw, np.uint8).reshape(result.height, result.width, 3)
    found = image_patches(torch.from_numpy(pixels.copy()), spec).numpy()
    assert [[1, *limits.grid(width, height)]] == expected["image_grid_thw"].tolist()
    assert found.shape == expected["pixel_values"].shape
    assert len(found) == 4 * limits.num_tokens(width, height)
    unit = 1 / 255 / min(spec.std)
    assert np.abs(found - expected["pixel_values"]).max() < unit * 1e-3


def test_rows_go_by_squares_and_values_by_channel_frame_and_place() -> None:
    place = np.arange(64 * 96, dtype=np.int64).reshape(64, 96)
    pixels = np.stack([place % 251, place // 251, place % 7], -1).astype(np.uint8)
    spec = PatchSpec(mean=(0, 0, 0), std=(1 / 255, 1 / 255, 1 / 255))
    rows = image_patches(torch.from_numpy(pixels), spec).round().to(torch.uint8).numpy()
    for row, (y, x) in {0: (0, 0), 1: (0, 16), 2: (16, 0), 4: (0, 32), 12: (32, 0)}.items():
        values = rows[row].reshape(3, 2, 16, 16)
        expected = pixels[y : y + 16, x : x + 16].transpose(2, 0, 1)
        assert (values[:, 0] == expected).all() and (values[:, 1] == expected).all()


def test_a_size_that_is_no_multiple_of_a_token_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError):
        image_patches(torch.zeros(48, 64, 3, dtype=torch.uint8), QWEN3)


def test_pillow_and_the_library_agree_about_what_bicubic_is() -> None:
    picture = noise(100, 70)
    resized = picture.resize((64, 64), Image.Resampling.BICUBIC)
    processor = library(QWEN3)
    direct = processor(resized, do_resize=False, return_tensors="np")["pixel_values"]
    rows = image_patches(torch.from_numpy(np.asarray(resized).copy()), QWEN3)
    assert np.abs(rows.numpy() - direct).max() < 1e-5
