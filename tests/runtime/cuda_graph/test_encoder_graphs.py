"""Small images are padded, and replay graphs of the encoder: the features are the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from model_zoo.vision.vision_config import VisionConfig
from runtime.cuda_graph import encoder_graphs
from runtime.cuda_graph.buckets import TILE
from runtime.cuda_graph.encoder_graphs import MAX_ROWS, EncoderGraphs, graph_rows
from tests.support.images.padded_encoder import (
    PUBLISHED,
    TINY,
    InterpretedPool,
    pool_of,
    random_encoder,
    read_lengths_on_device,
)
from tests.support.interpreter.unused_lanes import UNUSED_LANES

pytestmark = UNUSED_LANES
CPU = torch.device("cpu")
# Of tokens: several for each number of rows, in an order in which larger ones come between.
SIZES = [(2, 2), (4, 4), (3, 2), (2, 4), (1, 1), (5, 3), (3, 5), (4, 2), (2, 2)]
ROWS = (16, 32, 64)  # of patches: for at most 4, 8 and 16 tokens


def picture(rows: int, columns: int, seed: int, device: torch.device) -> Tensor:
    noise = torch.Generator().manual_seed(seed)
    shape = 32 * rows, 32 * columns, 3
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise).to(device)


def encode(encoder: Any, pixels: Tensor) -> Tensor:
    """All stages at once."""
    features = encoder.advance(encoder.begin(pixels), TINY.depth + 1)
    assert features is not None
    return features


@given(st.integers(1, 5_000), st.sampled_from([1, 2, 4]))
def test_an_image_is_padded_by_less_than_a_tile_and_few_graphs_serve_all(
    largest: int, square: int
) -> None:
    """largest: patches of an image, which --max-image-pixels allows."""
    vision = replace(PUBLISHED, merge_size=square)
    rows = graph_rows(vision, largest * vision.patch_size**2)
    assert list(rows) == sorted(set(rows)) and len(rows) <= 8
    assert all(each % vision.merge_size**2 == 0 for each in rows)
    assert rows[-1] == MAX_ROWS or rows[-1] >= largest > rows[-1] - TILE
    assert all(high - low == TILE for low, high in zip((0, *rows), rows, strict=False))


def test_squares_that_divide_no_tile_have_no_graphs_that_would_cut_them() -> None:
    assert all(each % 9 == 0 for each in graph_rows(replace(PUBLISHED, merge_size=3), 4 << 20))


def test_small_images_alone_are_padded(device: str) -> None:
    where = torch.device(device)
    graphs = EncoderGraphs(random_encoder(TINY, where), ROWS, where)
    expected = {(1, 1): 16, (2, 2): 16, (1, 5): 32, (2, 4): 32, (3, 3): 64, (4, 4): 64}
    for size, rows in expected.items():
        encoding = graphs.begin(picture(*size, 1, where))
        assert encoding.seqlens.padded == len(encoding.x) == len(encoding.cos_sin) == rows
        assert encoding.num_patches == 4 * size[0] * size[1]
    encoding = graphs.begin(picture(1, 17, 1, where))
    assert encoding.seqlens.padded == 0 and len(encoding.x) == 68


def test_features_of_a_padded_image_are_those_without_padding(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = torch.device(device)
    read_lengths_on_device(monkeypatch, where)
    encoder = random_encoder(TINY, where)
    graphs = EncoderGraphs(encoder, ROWS, where)
    for seed, size in enumerate(SIZES):
        pixels = picture(*size, seed, where)
        found, wanted = encode(graphs, pixels), encoder.encode(pixels)
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
        assert found.untyped_storage().nbytes() == found.nbytes, "padding is kept"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about NaN
def test_padding_reaches_no_feature(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even NaN, as memory may hold in rows that attention does not write."""
    where = torch.device(device)
    read_lengths_on_device(monkeypatch, where)
    encoder = random_encoder(TINY, where)
    with torch.inference_mode():
        encoding = encoder.begin(picture(3, 3, 1, where)).padded(64)
        wanted = encoder.advance(encoder.begin(picture(3, 3, 1, where)).padded(64), 4)
        encoding.x[36:], encoding.cos_sin[36:] = float("nan"), float("inf")
        found = encoder.advance(encoding, 4)
    assert found is not None and wanted is not None and torch.equal(found, wanted)


def check_replays(
    vision: VisionConfig, device: torch.device, dtype: torch.dtype, rows: tuple[int, ...],
    sizes: list[tuple[int, int]],
) -> None:  # fmt: skip
    """Each image after others in the same graphs has the bits that it has without graphs."""
    encoder = random_encoder(vision, device, dtype)
    graphs = EncoderGraphs(encoder, rows, device)
    images = [picture(*size, seed, device) for seed, size in enumerate(sizes)]
    stages = encoder.num_stages

    def encode_all() -> list[Tensor | None]:
        return [graphs.advance(graphs.begin(image), stages) for image in images]

    launched = encode_all()
    graphs.capture(pool_of(device))
    assert set(graphs.captured) == set(rows)
    # The second time the pool has outputs of other images.
    for found in (encode_all(), encode_all()):
        for image, one, wanted in zip(images, found, launched, strict=True):
            assert one is not None and wanted is not None
            assert torch.equal(one, wanted), image.shape
            assert one.isfinite().all()


def test_replayed_features_have_the_bits_of_those_that_are_launched(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_lengths_on_device(monkeypatch, torch.device(device))
    check_replays(TINY, torch.device(device), torch.float32, ROWS, SIZES)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_published_encoder_replays_the_bits_that_it_launches(dtype: torch.dtype) -> None:
    sizes = [
        (8, 8), (16, 16), (15, 17), (8, 9), (4, 4), (1, 32), (16, 15), (6, 4), (9, 14), (2, 1),
        (12, 12), (16, 16), (11, 10), (13, 15), (24, 8), (20, 20),
    ]  # fmt: skip
    device = torch.device("cuda", torch.cuda.current_device())
    check_replays(PUBLISHED, device, dtype, graph_rows(PUBLISHED, 4 << 20), sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(4, 4), (8, 8), (9, 11), (16, 16)])
def test_features_of_a_published_encoder_that_are_replayed_are_near_those_without_padding(
    size: tuple[int, int],
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    encoder = random_encoder(PUBLISHED, device, torch.bfloat16)
    graphs = EncoderGraphs(encoder, graph_rows(PUBLISHED, 4 << 20), device)
    graphs.capture(pool_of(device))
    pixels = picture(*size, 1, device)
    found = graphs.advance(graphs.begin(pixels), encoder.num_stages)
    assert found is not None
    similar = torch.cosine_similarity(found.float(), encoder.encode(pixels).float(), dim=-1)
    assert similar.min() > 0.999


def test_kept_features_are_not_those_that_the_next_replay_writes(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = torch.device(device)
    read_lengths_on_device(monkeypatch, where)
    graphs = EncoderGraphs(random_encoder(TINY, where), ROWS, where)
    graphs.capture(pool_of(where))
    first = encode(graphs, picture(2, 2, 1, where))
    before = first.clone()
    second = encode(graphs, picture(2, 2, 2, where))
    assert torch.equal(first, before) and not torch.equal(first, second)
    assert first.untyped_storage().nbytes() == first.nbytes


def test_an_image_that_is_cut_is_launched_and_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_lengths_on_device(monkeypatch, CPU)
    graphs = EncoderGraphs(random_encoder(TINY, CPU), ROWS, CPU)
    graphs.capture(pool_of(CPU))
    pixels = picture(2, 3, 1, CPU)
    encoding = graphs.begin(pixels)
    assert [graphs.advance(encoding, stages) for stages in (1, 2)] == [None, None]
    assert encoding.stage == 3
    found = graphs.advance(encoding, 1)
    assert found is not None and torch.equal(found, encode(graphs, pixels))


def test_an_encoder_that_cannot_be_captured_warns_and_is_launched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_lengths_on_device(monkeypatch, CPU)
    graphs = EncoderGraphs(random_encoder(TINY, CPU), ROWS, CPU)
    launched = encode(graphs, picture(2, 2, 1, CPU))
    graphs.capture(InterpretedPool(captures=1))
    assert "2 sizes are encoded without a graph" in caplog.text and "not permitted" in caplog.text
    assert set(graphs.captured) == {64}, "the largest first"
    graphs.capture(InterpretedPool())
    assert set(graphs.captured) == {64}, "it is not tried again"
    assert torch.equal(encode(graphs, picture(2, 2, 1, CPU)), launched)


def test_the_memory_of_graphs_is_that_of_the_largest_and_of_as_many_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_lengths_on_device(monkeypatch, CPU)
    free = iter([10_000, 9_000, 8_990])
    monkeypatch.setattr(encoder_graphs, "free_bytes", lambda device: next(free))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    pool = InterpretedPool()
    graphs = EncoderGraphs(random_encoder(TINY, CPU), ROWS, CPU)
    assert graphs.measure(pool) == 1000 + 10 * 2
    assert not graphs.captured and pool.renewals == 1
    graphs.capture(pool)
    assert set(graphs.captured) == set(ROWS)


def test_memory_is_not_measured_where_nothing_can_be_captured_and_its_lack_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_lengths_on_device(monkeypatch, CPU)
    graphs = EncoderGraphs(random_encoder(TINY, CPU), ROWS, CPU)

    def fail(run: object) -> None:
        raise torch.OutOfMemoryError("no memory left")

    pool: Any = InterpretedPool()
    pool.record = fail
    with pytest.raises(torch.OutOfMemoryError):
        graphs.measure(pool)
    assert graphs.measure(InterpretedPool(captures=0)) == 0
    graphs.capture(InterpretedPool())
    assert not graphs.captured
