"""silu(gate) * up of many rows: the kernel against float64, and when it is chosen."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model_zoo.layers.gemm.bands import FEW_MORE, bands
from model_zoo.layers.gemm.swiglu import SIZES, SwigluGemm
from model_zoo.layers.linear import MIN_ADDMM_ROWS, Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.swiglu_linear import SwigluLinear

ROWS = (1, 65, 128, 500, 640, 803, 1667)
SHAPES = ((2 * 3072, 1024), (2 * 200, 264), (16, 1000))
LARGE = (24576, 4096, (1024, 4096, 8192))


def numbers(dtype: torch.dtype, *shape: int, device: str = "cuda") -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def weights(dtype: torch.dtype, outputs: int, inputs: int) -> Tensor:
    return (numbers(torch.float32, outputs, inputs) * (2 / math.sqrt(inputs))).to(dtype)


def swiglu(gemms: Tensor) -> Tensor:
    gate, up = gemms.chunk(2, -1)
    return F.silu(gate) * up


def check(x: Tensor, weight: Tensor) -> None:
    """That the error is at most twice that of the same maths in the numbers' own type."""
    exact = swiglu(x.double() @ weight.double().T)
    coarse = swiglu(F.linear(x.float(), weight.float()).to(x.dtype))
    y = SwigluGemm().run(x, weight, None)
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert (y.double() - exact).norm() <= 2 * (coarse.double() - exact).norm()
    assert (y.double() - exact).abs().max() <= 2 * (coarse.double() - exact).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gated_gemms_are_as_exact_as_the_dtype_allows(dtype: torch.dtype):
    for outputs, inputs in SHAPES:
        weight = weights(dtype, outputs, inputs)
        for rows in ROWS:
            check(numbers(dtype, rows, inputs), weight)


@pytest.mark.gpu
def test_those_of_a_large_model_are_exact_too():
    outputs, inputs, several = LARGE
    weight = weights(torch.bfloat16, outputs, inputs)
    for rows in several:
        check(numbers(torch.bfloat16, rows, inputs), weight)


@pytest.mark.gpu
def test_large_gates_neither_overflow_nor_leave_nan():
    """exp(-gate) is infinite for gates below -88."""
    x = torch.full((70, 256), 8.0, dtype=torch.bfloat16, device="cuda")
    weight = torch.ones(512, 256, dtype=torch.bfloat16, device="cuda")
    weight[:128] = -1.0
    y = SwigluGemm().run(x, weight, None)
    assert not y[:, :128].any() and bool((y[:, 128:] == 2048.0**2).all())


@pytest.mark.gpu
def test_a_row_has_the_same_result_among_any_others():
    x, weight = numbers(torch.bfloat16, 803, 1024), weights(torch.bfloat16, 1024, 1024)
    whole = SwigluGemm().run(x, weight, None)
    for rows in (1, 64, 65, 300):
        assert torch.equal(SwigluGemm().run(x[:rows], weight, None), whole[:rows])
        assert torch.equal(SwigluGemm().run(x[-rows:], weight, None), whole[-rows:])


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [300, 1300])
def test_a_captured_chain_gives_the_same_bits_at_each_replay(rows: int):
    """Of layers' second halves: each kernel reads what the one before wrote, and some begin early.

    With 1300 rows cuBLAS adds to the residual.
    """
    made: list[tuple[SwigluLinear, Linear]] = []
    with torch.device("cuda"):
        for _ in range(6):
            up = SwigluLinear(512, 1024, bias=False, dtype=torch.bfloat16)
            down = Linear(1024, 512, bias=False, dtype=torch.bfloat16)
            for layer in (up, down):
                nn.init.normal_(layer.weight, std=0.05)
            up.use_swiglu(dict.fromkeys(SIZES, SwigluGemm()))
            made.append((up, down))
        norm = RMSNorm(512, 1e-6, torch.bfloat16)
    nn.init.ones_(norm.weight)
    first = numbers(torch.bfloat16, rows, 512)

    def chain() -> Tensor:
        x, residual = norm.add(None, first.clone())
        for up, down in made:
            x, residual = norm.add(*down.add(up.swiglu(x), residual))
        return x

    exact = first.double()
    for up, down in made:
        x = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
        exact = exact + swiglu(x @ up.weight.double().T) @ down.weight.double().T
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)
    expected = chain().clone()
    assert (expected.double() - exact).norm() <= 0.02 * exact.norm()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_cublas_adds_to_the_residual_is_as_exact_as_a_gemm_and_then_a_sum(
    dtype: torch.dtype,
):
    with torch.device("cuda"):
        layer = Linear(768, 512, bias=False, dtype=dtype)
    nn.init.normal_(layer.weight, std=0.05)
    x, residual = numbers(dtype, MIN_ADDMM_ROWS, 768), numbers(dtype, MIN_ADDMM_ROWS, 512)
    exact = residual.double() + x.double() @ layer.weight.double().T
    coarse = residual + (x.float() @ layer.weight.float().T).to(dtype)
    nothing, total = layer.add(x, residual)
    assert nothing is None and total is residual
    assert (total.double() - exact).norm() <= 1.02 * (coarse.double() - exact).norm()


def test_on_a_cpu_a_layer_only_says_what_is_to_be_added():
    layer = Linear(8, 16, bias=False, dtype=torch.float32)
    nn.init.normal_(layer.weight)
    x, residual = (numbers(torch.float32, MIN_ADDMM_ROWS, size, device="cpu") for size in (8, 16))
    before = residual.clone()
    y, same = layer.add(x, residual)
    assert y is not None and torch.equal(y, layer(x))
    assert same is residual and torch.equal(residual, before)


@pytest.mark.parametrize("processors", [1, 7, 78, 114, 132])
@pytest.mark.parametrize("cached", [1, 5, 20])
def test_programs_keep_to_their_rows_only_where_that_takes_hardly_more_rounds(
    processors: int, cached: int
):
    for m_tiles in range(1, 70):
        for n_tiles in (1, 8, 96):
            tiles = m_tiles * n_tiles
            programs, band = bands(m_tiles, n_tiles, cached, processors)
            assert 1 <= programs <= min(processors, tiles) and 1 <= band <= min(m_tiles, cached)
            fewest = -(-tiles // processors)
            assert fewest <= -(-tiles // programs) <= FEW_MORE * fewest


@pytest.mark.parametrize("rows", [512, 1024, 1536, 2048, 2560, 3072, 4096, 6144, 8192])
def test_programs_keep_to_their_rows_in_full_steps_of_an_8b_model(rows: int):
    programs, band = bands(rows // 128, 96, 20, 132)
    assert programs % band == 0 and rows // 128 % band == 0 and programs >= 128


class CountingSwiglu:
    """A way that says that it ran."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.rows.append(len(x))
        return swiglu(x @ weight.T)


def test_the_number_of_rows_says_which_way_is_taken():
    layer = SwigluLinear(8, 16, bias=False, dtype=torch.float32)
    nn.init.normal_(layer.weight)
    several, most = CountingSwiglu(), CountingSwiglu()
    layer.use_swiglu({256: several, SIZES[-1]: most})
    for rows in (1, 64, 65, 192, 193, 256, 257, 1920, 1921, 2048, 5000):
        x = numbers(torch.float32, rows, 8, device="cpu")
        torch.testing.assert_close(layer.swiglu(x), swiglu(x @ layer.weight.T))
    assert several.rows == [193, 256], "others have no choice, or few rows"
    assert most.rows == [1921, 2048, 5000], "more rows than were measured are computed as the most"


@pytest.mark.parametrize(
    ("shape", "serves"),
    [
        ((65, 24576, 4096), True),
        ((1, 16, 256), True),
        ((0, 16, 256), False),
        ((65, 24576, 248), False),  # less than a ring of columns
        ((65, 24576, 4100), False),  # rows of x that are not 16-byte aligned
        ((65, 24, 4096), False),  # rows of the result neither
    ],
)
def test_the_kernel_says_what_it_serves(shape: tuple[int, int, int], serves: bool):
    assert SwigluGemm().serves(*shape) == serves
