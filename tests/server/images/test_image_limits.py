"""Sizes and tokens of images are those of transformers' processor."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from server.images.image_error import ImageError
from server.images.limits import ImageLimits, fitted
from tests.support.examples import examples

QWEN3 = ImageLimits(token="<|image_pad|>", max_pixels=16_777_216)
QWEN25 = ImageLimits(token="<|image_pad|>", patch_size=14, min_pixels=3136, max_pixels=12_845_056)


@examples(800)
@given(
    st.integers(1, 12_000),
    st.integers(1, 12_000),
    st.sampled_from([QWEN3, QWEN25]),
    st.integers(65_536, 16_777_216),
)
def test_sizes_are_those_of_the_models_processor(
    width: int, height: int, model: ImageLimits, most: int
) -> None:
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(ValueError):
            smart_resize(height, width)
        with pytest.raises(ImageError, match="at most 200 times"):
            model.size(width, height)
        return
    factor, least = model.factor, model.min_pixels
    expected = smart_resize(height, width, factor, least, most)
    assert fitted(width, height, factor, least, most) == expected[::-1]
    assert fitted(height, width, factor, least, most) == expected, "turning changes the tokens"


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (1024, 1024, 1024),
        (1, 1, 64),
        (32, 32, 64),
        (640, 480, 300),
        (1920, 1080, 60 * 34),
        (4096, 4096, 16_384),
        (8192, 8192, 16_384),
        (5, 1000, 114),
    ],
)
def test_the_tokens_of_some_sizes(width: int, height: int, tokens: int) -> None:
    assert QWEN3.num_tokens(*QWEN3.size(width, height)) == tokens


def test_the_default_cap_is_four_million_pixels() -> None:
    model = ImageLimits(token="<|image_pad|>")
    width, height = model.size(8000, 6000)
    assert 3_800_000 < width * height <= 4_194_304
    assert model.num_tokens(*model.size(8192, 8192)) == 4096


def test_detail_low_takes_a_quarter_of_a_million_pixels_at_most() -> None:
    assert QWEN3.num_tokens(*QWEN3.size(3000, 3000, "low")) == 256
    assert QWEN3.num_tokens(*QWEN3.size(300, 300, "low")) == QWEN3.num_tokens(*QWEN3.size(300, 300))
    for detail in ("auto", "high", "original", None):
        assert QWEN3.size(3000, 3000, detail) == (3008, 3008)


@pytest.mark.parametrize(("width", "height"), [(1, 60_000), (60_000, 1), (201, 1)])
def test_a_line_of_pixels_is_refused_with_its_size(width: int, height: int) -> None:
    with pytest.raises(ImageError, match=f"is {width} x {height} pixels: one side may be at most"):
        QWEN3.size(width, height)


def test_a_grid_is_of_patches_and_has_merge_size_squared_of_them_a_token() -> None:
    width, height = QWEN25.size(640, 480)
    rows, columns = QWEN25.grid(width, height)
    assert (rows * 14, columns * 14) == (height, width)
    assert rows * columns == 4 * QWEN25.num_tokens(width, height)
