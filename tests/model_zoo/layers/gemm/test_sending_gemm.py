"""x W^T stored in several places: the kernel against float64, on a GPU and interpreted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm import bands
from model_zoo.layers.gemm.sending import SendingGemm
from tests.support.interpreter.gluon_interpreter import interpreted

ROWS = (1, 65, 128, 500, 640, 803, 1667)
SHAPES = ((1024, 2048), (4096, 256), (520, 264), (200, 1000), (8, 192))  # N, K
LARGE = ((4096, 2048), (4096, 6144))
POISON = 77.0
DTYPES = [torch.bfloat16, torch.float16]
GEMMS = [SendingGemm(paced=False), SendingGemm(), SendingGemm(piece_rows=32)]
# Factors of x and W: float32 has their product, which rounds to 0.0 or -0.0.
TINY = {torch.bfloat16: (2.0**-70, 2.0**-72), torch.float16: (2.0**-14, 2.0**-20)}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a device of three processors, whose programs compute several tiles each."""
    monkeypatch.setattr(bands, "processors", lambda device: 3)
    folder = "model_zoo.layers.gemm.hopper"
    modules = [f"{folder}.{name}" for name in ("many_rows", "paced_stores", "sending_gemm")]
    with interpreted("sending_gemm_hopper", *modules):
        yield


def numbers(dtype: torch.dtype, *shape: int, device: str = "cuda") -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def operands(
    dtype: torch.dtype, rows: int, outputs: int, inputs: int, device: str = "cuda"
) -> tuple[Tensor, Tensor]:
    """x [M, K] and W [N, K]: every fifth row of both is tiny, every seventh of x is 0.0."""
    x = numbers(dtype, rows, inputs, device=device)
    x[3::7] = 0.0
    x[2::5] *= TINY[dtype][0]
    weight = numbers(torch.float32, outputs, inputs, device=device) / math.sqrt(inputs)
    weight[1::5] *= TINY[dtype][1]
    return x, weight.to(dtype)


def is_negative_zero(x: Tensor) -> Tensor:
    return (x == 0) & x.signbit()


def poisoned(x: Tensor, outputs: int, count: int) -> list[Tensor]:
    """Memory of so many outputs, each with a row before and 130 rows after it."""
    return [torch.full((len(x) + 131, outputs), POISON).to(x) for _ in range(count)]


def name_of(gemm: SendingGemm) -> str:
    return f"in pieces of {gemm.piece_rows} rows" if gemm.paced else "at once"


each_gemm = pytest.mark.parametrize("gemm", GEMMS, ids=name_of)


def check(gemm: SendingGemm, x: Tensor, weight: Tensor, outs: int) -> Tensor:
    """That the error is at most twice that of rounding alone, in equal outputs without -0.0."""
    exact = x.double() @ weight.double().T
    coarse = exact.to(x.dtype).double()
    memory = poisoned(x, len(weight), outs)
    gemm.run_into(x, weight, [each[1 : len(x) + 1] for each in memory])
    for each in memory:
        assert torch.equal(each, memory[0]) and not bool(is_negative_zero(each).any())
        assert bool((each[0] == POISON).all()) and bool((each[len(x) + 1 :] == POISON).all())
    y = memory[0][1 : len(x) + 1]
    assert (y.double() - exact).norm() <= 2 * (coarse - exact).norm()
    assert (y.double() - exact).abs().max() <= 2 * (coarse - exact).abs().max()
    return y


def check_negative_zeros(gemm: SendingGemm, dtype: torch.dtype, device: str) -> None:
    """That sums that round to -0.0, and those that cancel, are 0.0; others keep their signs."""
    first, second = TINY[dtype]
    x = torch.full((70, 192), first, dtype=dtype)
    weight = torch.full((16, 192), -second, dtype=dtype)
    weight[8:] = -1.0
    weight[12:, 96:] = 1.0
    assert bool(is_negative_zero((x.float() @ weight[:8].float().T).to(dtype)).all())
    y = check(gemm, x.to(device), weight.to(device), 2)
    assert not y[:, :8].any() and bool((y[:, 8:12] < 0).all()) and not y[:, 12:].any()


@pytest.mark.gpu
@each_gemm
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_round_to_negative_zero_are_zero(gemm: SendingGemm, dtype: torch.dtype):
    check_negative_zeros(gemm, dtype, "cuda")


@pytest.mark.gpu
@each_gemm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outs", [1, 2])
def test_outputs_are_equal_and_as_exact_as_the_dtype_allows(
    gemm: SendingGemm, dtype: torch.dtype, outs: int
):
    for outputs, inputs in SHAPES:
        for rows in ROWS:
            check(gemm, *operands(dtype, rows, outputs, inputs), outs)


@pytest.mark.gpu
@each_gemm
@pytest.mark.parametrize("rows", [512, 8192])
def test_those_of_a_large_model_are_exact_too(gemm: SendingGemm, rows: int):
    for outputs, inputs in LARGE:
        check(gemm, *operands(torch.bfloat16, rows, outputs, inputs), 2)


@pytest.mark.gpu
@each_gemm
@pytest.mark.parametrize("outs", range(3, 9))
def test_there_may_be_eight_outputs(gemm: SendingGemm, outs: int):
    check(gemm, *operands(torch.bfloat16, 803, 520, 264), outs)


@pytest.mark.gpu
@each_gemm
def test_a_row_has_the_same_result_among_any_others(gemm: SendingGemm):
    x, weight = operands(torch.bfloat16, 803, 1024, 512)
    whole = check(gemm, x, weight, 2)
    for rows in (1, 64, 65, 300):
        assert torch.equal(check(gemm, x[:rows], weight, 2), whole[:rows])
        assert torch.equal(check(gemm, x[-rows:], weight, 2), whole[-rows:])


@pytest.mark.gpu
@each_gemm
@pytest.mark.parametrize("rows", [300, 1300])
def test_a_captured_chain_gives_the_same_bits_at_each_replay(gemm: SendingGemm, rows: int):
    """Each GEMM reads the last output of the one before, and some begin early."""
    weights = [numbers(torch.bfloat16, 1024, 1024) / 32 for _ in range(8)]
    first = numbers(torch.bfloat16, rows, 1024)
    outs = [[torch.empty_like(first) for _ in range(2)] for _ in weights]

    def chain() -> Tensor:
        x = first
        for weight, two in zip(weights, outs, strict=True):
            gemm.run_into(x, weight, two)
            x = two[-1]
        return x

    exact = first.double()
    for weight in weights:
        exact = exact @ weight.double().T
    expected = chain().clone()
    assert (expected.double() - exact).norm() <= 0.02 * exact.norm()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        for two in outs:
            for each in two:
                each.zero_()
        graph.replay()
        assert torch.equal(out, expected)
        assert all(torch.equal(*two) for two in outs)


@each_gemm
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "outs"),
    [(300, 520, 264, 2), (129, 1024, 192, 1), (5, 8, 200, 8), (500, 296, 2000, 2)],
)
def test_tiles_barriers_and_maths_hold_where_the_kernel_is_interpreted(
    on_cpu: None,
    gemm: SendingGemm,
    dtype: torch.dtype,
    rows: int,
    outputs: int,
    inputs: int,
    outs: int,
):
    check(gemm, *operands(dtype, rows, outputs, inputs, "cpu"), outs)


@each_gemm
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_round_to_negative_zero_are_zero_where_interpreted(
    on_cpu: None, gemm: SendingGemm, dtype: torch.dtype
):
    check_negative_zeros(gemm, dtype, "cpu")


@pytest.mark.parametrize(
    ("shape", "serves"),
    [
        ((65, 4096, 2048), True),
        ((1, 8, 192), True),
        ((0, 8, 192), False),
        ((65, 4096, 184), False),  # less than a ring of columns
        ((65, 4096, 2052), False),  # rows of x that are not 16-byte aligned
        ((65, 20, 2048), False),  # rows of the result neither
    ],
)
def test_the_kernel_says_what_it_serves(shape: tuple[int, int, int], serves: bool):
    assert SendingGemm().serves(*shape) == serves


def test_full_steps_of_an_8b_model_on_two_gpus_keep_programs_to_their_rows(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(bands, "processors", lambda device: 132)
    for inputs in (2048, 6144):
        grid = bands.tile_grid(torch.device("cpu"), 8192, 4096, inputs, width=256)
        assert grid.programs == 128 and grid.m_tiles == 64 and grid.n_tiles == 16
        assert 128 % grid.band == 0 and grid.k_blocks * 64 == inputs
