"""Checks, at a start, of what the chosen GEMMs compute besides their products."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormedRows
from model_zoo.layers.swiglu_linear import SwigluLinear

# Of a result's norm.  Activations in fp8, which ScaledMM rounds to, change a product by about 0.03.
LARGEST_ERROR = 1 / 16
TILES = 300  # of a norm's squares: more than a program loads at once
EPS = 1e-6
log = logging.getLogger(__name__)


def check_fused(name: str, rows: int, layers: Sequence[Linear]) -> None:
    """Leave gated activations and norms to kernels of their own where the GEMM's are others.

    layers  of one shape, with one GEMM for so many rows; name: theirs in a warning
    """
    gated = _gated(layers)
    off = _error_of_gates(rows, gated)
    if not off <= LARGEST_ERROR:
        log.warning(
            "%s: the GEMM's own %s is not used: it differs by %.0f %%",
            name, gated[0].gate, 100 * off,
        )  # fmt: skip
        for layer in gated:
            layer.may_gate = False
    off = _error_of_norms(rows, layers)
    if not off <= LARGEST_ERROR:
        log.warning(
            "%s: the GEMM's own norms are not used: they differ by %.0f %%", name, 100 * off
        )
        for layer in layers:
            layer.may_norm = False


def fused_is_right(rows: int, layers: Sequence[Linear]) -> bool:
    """Whether check_fused would leave all to the GEMM of so many rows that the layers use."""
    errors = _error_of_gates(rows, _gated(layers)), _error_of_norms(rows, layers)
    return all(off <= LARGEST_ERROR for off in errors)


def _gated(layers: Sequence[Linear]) -> list[SwigluLinear]:
    return [layer for layer in layers if isinstance(layer, SwigluLinear)]


def _error_of_gates(rows: int, layers: Sequence[SwigluLinear]) -> float:
    """0 where no GEMM computes the activation."""
    if not layers or layers[0].gating_gemm(rows) is None:
        return 0.0
    return _gate_error(layers[0], rows)


def _gate_error(layer: SwigluLinear, rows: int) -> float:
    """Of the GEMM's own activation, in norms of that by a kernel of its own; it may be NaN."""
    from triton.runtime.errors import OutOfResources

    x = torch.randn(rows, layer.inputs, dtype=layer.dtype, device=layer.device)
    try:
        output = layer.swiglu(x)
    except OutOfResources:
        return math.inf
    layer.may_gate = False
    expected = layer.swiglu(x)
    layer.may_gate = True
    assert isinstance(output, Tensor) and isinstance(expected, Tensor)
    return _error(output, expected)


def _error_of_norms(rows: int, layers: Sequence[Linear]) -> float:
    """0 where no GEMM does a part of norms."""
    if layers[0].norming_gemm(rows) is None:
        return 0.0
    return _fused_norm_error(layers, rows)


def _fused_norm_error(layers: Sequence[Linear], rows: int) -> float:
    """The larger one of those of sums and of norms, of all that the layers run."""
    from triton.runtime.errors import OutOfResources

    gated = _gated(layers)
    others = [layer for layer in layers if not isinstance(layer, SwigluLinear)]
    adding = [layer for layer in layers if layer.adds_to_residual]
    try:
        found = [_norm_error(kind[0], rows) for kind in (gated, others) if kind]
        return max(found + [_sum_error(layer, rows) for layer in adding[:1]])
    except OutOfResources:
        return math.inf


def _sum_error(layer: Linear, rows: int) -> float:
    """Of the sum of the residual and the product, of its squares, and of it times a weight."""
    gemm = layer.norming_gemm(rows)
    assert gemm is not None
    x = torch.randn(rows, layer.inputs, dtype=layer.dtype, device=layer.device)
    # Not of the layer, which may add up the products of all ranks.
    product = gemm.run(x, layer.operand, layer.bias)
    residual = torch.randn_like(product) * product.std()
    expected = residual + product
    norm = RMSNorm(layer.outputs, EPS, layer.dtype, plus_one=True).to(layer.device)
    norm.weight.uniform_(-0.5, 0.5)
    normed = gemm.add_to(residual, x, layer.operand, layer.bias, norm)
    of_squares = _error(normed.squares.sum(0), expected.float().square().sum(1))
    of_weighted = _error(normed.weighted, expected * (norm.weight + 1))
    return max(_error(residual, expected), of_squares, of_weighted)


def _norm_error(layer: Linear, rows: int) -> float:
    """Of the product of a norm of rows of different sizes, and of its gate."""
    gemm = layer.norming_gemm(rows)
    assert gemm is not None
    sizes = torch.logspace(1, 4, rows, base=2, dtype=layer.dtype, device=layer.device)
    x = torch.randn(rows, layer.inputs, dtype=layer.dtype, device=layer.device) * sizes[:, None]
    squares = x.float().square().sum(1)
    shares = torch.rand(TILES, 1, device=layer.device)
    normed = (x.float() * torch.rsqrt(squares / layer.inputs + EPS)[:, None]).to(x.dtype)
    norm = RMSNorm(layer.inputs, EPS, layer.dtype).to(layer.device)  # x is a sum times its weight
    deferred = NormedRows(x, squares * (shares / shares.sum()), norm)
    if isinstance(layer, SwigluLinear):
        found, expected = layer.swiglu(deferred), layer.swiglu(normed)
        assert isinstance(found, Tensor) and isinstance(expected, Tensor)
        return _error(found, expected)
    found = gemm.multiply(deferred, layer.operand, layer.bias, None)
    return _error(found, gemm.run(normed, layer.operand, layer.bias))


def _error(found: Tensor, expected: Tensor) -> float:
    """In norms of what is expected; infinite for NaN."""
    off = float((found.float() - expected.float()).norm() / expected.float().norm().clamp(1e-30))
    return math.inf if math.isnan(off) else off
