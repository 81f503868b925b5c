"""GEMMs of --deterministic: right, and with the same bits for a row in any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from model_zoo.layers import fused_kernels
from model_zoo.layers.gemm import autotune
from model_zoo.layers.gemm.batch_invariant import use_batch_invariant_gemms
from model_zoo.layers.gemm.batch_invariant_kernel import LARGE, SMALL, BatchInvariantGemm, Tile
from model_zoo.layers.linear import Linear
from model_zoo.layers.swiglu_linear import SwigluLinear
from tests.support.interpreter.ordered_dot import ordered_dot  # noqa: F401

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = (1, 2, 8, 9, 16, 17, 32, 64, 65, 100, 128, 200, 256, 300, 512, 1000, 2048)
SHAPES = ((6144, 4096), (4096, 12288), (1000, 328), (1024, 3072), (50000, 768))


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def check(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """That the error is at most twice that of the same maths in float32, rounded once.

    Of float32 ten times: a sum in one chain is less exact than one of several chains.
    """
    exact, single = x.double() @ weight.double().T, x.float() @ weight.float().T
    if bias is not None:
        exact, single = exact + bias.double(), single + bias.float()
    times = 10 if x.dtype == torch.float32 else 2
    limit = times * (single.to(x.dtype).double() - exact).norm() + 1e-9
    assert y.shape == exact.shape and y.dtype == x.dtype
    assert (y.double() - exact).norm() <= limit


class Small(BatchInvariantGemm):
    """Tiles of a few rows, for the interpreter."""

    def tile(self, rows: int, outputs: int, dtype: torch.dtype) -> Tile:
        return Tile(8 if rows < 20 else 16, 16 if rows < 40 else 32, 32, 4, 2)


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40, 72), (16, 96), (70, 40)])
def test_any_number_of_rows_gives_the_bits_of_one(shape: tuple[int, int], dtype: torch.dtype):
    """Interpreted: of the order of summation, which the tiles must not decide."""
    outputs, inputs = shape
    weight, bias = numbers("cpu", dtype, outputs, inputs), numbers("cpu", dtype, outputs)
    x, gemm = numbers("cpu", dtype, 50, inputs), Small(1)
    whole = gemm.run(x, weight, bias)
    for rows in (1, 7, 19, 33):
        assert torch.equal(gemm.run(x[:rows], weight, bias), whole[:rows])
    if dtype != torch.bfloat16:  # to which the interpreter does not round
        check(whole, x, weight, bias)
        check(gemm.run(x, weight, None), x, weight, None)
    assert gemm.run(x[:0], weight, bias).shape == (0, outputs)


@pytest.mark.parametrize("rows", ROWS)
def test_a_tile_holds_few_rows_whole_and_many_fill_the_device(rows: int):
    tile = BatchInvariantGemm(132).tile(rows, 24576, torch.bfloat16)
    assert tile in SMALL.values() if rows <= 64 else tile in LARGE
    assert (
        tile.rows >= min(rows, 64)
        and BatchInvariantGemm(132).tile(8192, 4096, torch.bfloat16) == LARGE[0]
    )


def settled(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool) -> Linear:
    layer = Linear(inputs, outputs, bias=bias, dtype=dtype).to("cuda")
    layer.weight.copy_(numbers("cuda", dtype, outputs, inputs))
    if layer.bias is not None:
        layer.bias.copy_(numbers("cuda", dtype, outputs))
    use_batch_invariant_gemms(nn.Sequential(layer))
    return layer


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_a_layer_gives_a_row_the_same_bits_among_any_others(
    shape: tuple[int, int], dtype: torch.dtype
):
    """By all kernels that serve some number of rows: Stream's and every tile of
    BatchInvariantGemm.
    """
    outputs, inputs = shape
    layer = settled(outputs, inputs, dtype, bias=outputs == 1000)
    x = numbers("cuda", dtype, max(ROWS), inputs)
    whole = layer(x)
    for rows in ROWS:
        y = layer(x[:rows])
        check(y[-1:], x[rows - 1 : rows], layer.weight, layer.bias)
        assert torch.equal(y, whole[:rows]), (rows, (y != whole[:rows]).float().mean().item())
    alone = torch.cat([layer(x[row : row + 1]) for row in range(0, 2048, 97)])
    assert torch.equal(alone, whole[::97]), "wherever the row stands"


def test_rows_that_no_tile_can_be_copied_from_are_refused():
    layer = Linear(100, 64, bias=False, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="0 has rows of 100 numbers, not of whole 16 bytes"):
        use_batch_invariant_gemms(nn.Sequential(layer))


def test_a_settled_layer_leaves_nothing_to_choose_and_takes_no_other_way(
    monkeypatch: pytest.MonkeyPatch,
):
    """Not even where a GPU would add many rows to the residual, or gate them, at once."""
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)
    monkeypatch.setattr(autotune, "supports_kernels", lambda device, dtype: True)
    layer = SwigluLinear(16, 8, bias=False, dtype=torch.bfloat16)
    assert autotune.layers_by_key(nn.Sequential(layer))
    use_batch_invariant_gemms(nn.Sequential(layer))
    assert not autotune.layers_by_key(nn.Sequential(layer))
    monkeypatch.setattr(
        BatchInvariantGemm, "run", lambda self, x, weight, bias: x.new_ones(len(x), 16)
    )
    for rows in (1, 64, 65, 4000):
        residual = torch.zeros(rows, 16, dtype=torch.bfloat16)
        y, unchanged = layer.add(torch.zeros(rows, 16, dtype=torch.bfloat16), residual)
        assert y is not None and y.min() == 1 and unchanged.max() == 0
    assert layer._swiglu_gemms == []
