"""Products of many rows: tiles on tensor cores, plain and with silu(gate) * up, against float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.tiled import Tiled

WAYS = [Tiled(64, 256, 4), Tiled(128, 128, 4)]
ROWS = (1, 65, 128, 500, 640, 803, 1667)
SHAPES = ((6144, 1024), (2 * 3072, 1024), (1024, 3072), (2 * 200, 264), (16, 1000))
LARGE = ((24576, 4096, (1024, 4096, 8192)), (4096, 12288, (500, 2048)), (6144, 4096, (803,)))


def numbers(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def weights(dtype: torch.dtype, outputs: int, inputs: int) -> Tensor:
    return (numbers(torch.float32, outputs, inputs) * (2 / math.sqrt(inputs))).to(dtype)


def gated(products: Tensor) -> Tensor:
    gate, up = products.chunk(2, -1)
    return F.silu(gate) * up


def check(way: Tiled, x: Tensor, weight: Tensor) -> None:
    """That errors are at most twice those of the same maths in the numbers' own type."""
    exact = x.double() @ weight.double().T
    rounded = F.linear(x.float(), weight.float()).to(x.dtype)
    for y, right, coarse in (
        (way.run(x, weight), exact, rounded),
        (way.run_gated(x, weight), gated(exact), gated(rounded)),
    ):
        assert y.shape == right.shape and y.dtype == x.dtype
        assert (y.double() - right).norm() <= 2 * (coarse.double() - right).norm()
        assert (y.double() - right).abs().max() <= 2 * (coarse.double() - right).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tiles_are_as_exact_as_the_numbers_type_allows(way: Tiled, dtype: torch.dtype):
    for outputs, inputs in SHAPES:
        weight = weights(dtype, outputs, inputs)
        for rows in ROWS:
            if way.serves(rows, outputs, inputs):
                check(way, numbers(dtype, rows, inputs), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tiles_of_a_large_model_are_exact_too(way: Tiled):
    for outputs, inputs, several in LARGE:
        weight = weights(torch.bfloat16, outputs, inputs)
        for rows in several:
            check(way, numbers(torch.bfloat16, rows, inputs), weight)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_row_has_the_same_result_among_any_others(way: Tiled):
    x, weight = numbers(torch.bfloat16, 803, 1024), weights(torch.bfloat16, 1024, 1024)
    plain, gates = way.run(x, weight), way.run_gated(x, weight)
    for rows in (1, 64, 65, 300):
        assert torch.equal(way.run(x[:rows], weight), plain[:rows])
        assert torch.equal(way.run_gated(x[-rows:], weight), gates[-rows:])


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_captured_chain_gives_the_same_bits_at_each_replay(way: Tiled):
    """Each product reads what the one before wrote, while its own weights are on their way."""
    layers = [
        (weights(torch.bfloat16, 2048, 512), weights(torch.bfloat16, 512, 1024)) for _ in range(6)
    ]
    first = numbers(torch.bfloat16, 300, 512)

    def chain() -> Tensor:
        x = first
        for gate_up, down in layers:
            x = way.run(way.run_gated(x, gate_up), down)
        return x

    expected = chain().clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    assert expected.isfinite().all() and expected.any()
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("shape", "serves"),
    [
        ((65, 24576, 4096), True),
        ((1, 16, 256), True),
        ((0, 16, 256), False),
        ((65, 24576, 248), False),  # less than a ring of columns
        ((65, 24576, 4100), False),  # rows of x that are not 16-byte aligned
        ((65, 24, 4096), False),  # rows of half as many outputs neither
    ],
)
def test_tiles_say_what_they_serve(shape: tuple[int, int, int], serves: bool):
    assert Tiled(64, 256, 4).serves(*shape) == serves
