"""What GEMMs that add to a residual, or multiply a norm of it, have to compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.common.tma_rows import ROWS, with_rows_behind
from model_zoo.layers.gemm.implementations import NormingGemm, workspace
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormedRows

BF16 = torch.bfloat16
EPS = 0.25  # so large that it counts beside the rows' mean squares


def numbers(device: str, *shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape) + seed)
    return torch.randn(shape, generator=generator, device=device).to(BF16)


def norm_of(size: int, device: str, *, plus_one: bool = False) -> RMSNorm:
    norm = RMSNorm(size, EPS, BF16, plus_one=plus_one).to(device)
    norm.weight.copy_(numbers(device, size))
    return norm


def check_add(gemm: NormingGemm, rows: int, operand: Any, *, plus_one: bool = False) -> None:
    """That the residual, its squares and its product with the norm's weight are those of PyTorch.

    operand: the weight [N, K], or a PackedWeight
    """
    outputs, inputs = operand.shape
    device = operand.device.type
    x, norm = numbers(device, rows, inputs), norm_of(outputs, device, plus_one=plus_one)
    for bias in (None, numbers(device, outputs)):
        residual = numbers(device, rows, outputs, seed=1)
        product = gemm.multiply(x, operand, bias, None)
        expected = residual + product
        normed = gemm.add_to(residual, x, operand, bias, norm)
        assert torch.equal(residual, expected) and normed.norm is norm
        of_weight = residual.float() * (norm.weight.float() + plus_one)
        assert torch.equal(normed.weighted, of_weight.to(BF16))
        assert len(with_rows_behind(normed.weighted, ROWS)) >= ROWS, "for a GEMM after this one"
        sums = residual.double().square().sum(1)
        torch.testing.assert_close(normed.squares.sum(0).double(), sums, rtol=1e-5, atol=0)
    assert int(workspace(x.device)[1].sum()) == 0


def check_norm(
    gemm: NormingGemm, rows: int, operand: Any, exact_weight: Tensor, tiles: int = 37
) -> None:
    """That the product with a norm, and its gate, are wrong by at most twice as much as those of
    weights in bfloat16 that are rounded once.

    exact_weight: the numbers of the operand [N, K]
    tiles: of which there are squares
    """
    outputs, inputs = operand.shape
    device = operand.device.type
    sizes = torch.logspace(0, 4, rows, base=2, dtype=BF16, device=device)[:, None]
    residual, norm_weight = numbers(device, rows, inputs) * sizes, numbers(device, inputs)
    squares = residual.float().square()
    sums = torch.stack([part.sum(1) for part in squares.tensor_split(tiles, 1)])
    normed = NormedRows(residual * norm_weight, sums, norm_of(inputs, device))
    factors = torch.rsqrt(residual.double().square().mean(1) + EPS)[:, None]
    x, bias = normed.weighted.double() * factors, numbers(device, outputs)
    exact = x @ exact_weight.double().T
    rounded = x @ exact_weight.to(BF16).double().T
    for added in (None, bias):
        y, of_bias = gemm.multiply(normed, operand, added, None), 0 if added is None else added
        _check_rounded(y, exact + of_bias, rounded + of_bias)
    if gemm.gates(rows, operand) and outputs % 16 == 0:
        y = gemm.multiply(normed, operand, bias, "silu")
        _check_rounded(y, _gated(exact + bias), _gated(rounded + bias))


def _gated(both: Tensor) -> Tensor:
    gates, ups = both.chunk(2, -1)
    return F.silu(gates) * ups


def _check_rounded(y: Tensor, exact: Tensor, rounded: Tensor) -> None:
    limit = 2 * (rounded.to(BF16).double() - exact).norm() + 1e-4 * exact.norm()
    assert (y.double() - exact).norm() <= limit
