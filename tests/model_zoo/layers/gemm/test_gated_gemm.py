"""GEMMs of few rows that compute the gated activation of their output, too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm.candidates import gemm_candidates
from model_zoo.layers.gemm.check_fused import check_fused, fused_is_right
from model_zoo.layers.gemm.implementations import (
    BUCKETS,
    Gate,
    GatingGemm,
    SkinnyGemm,
    workspace,
)
from model_zoo.layers.linear import Linear
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm
from model_zoo.layers.quantized_gemm.skinny_candidates import skinny_candidates
from model_zoo.layers.quantized_rows import QuantizedRows, QuantizedRowsGemm
from model_zoo.layers.swiglu_linear import SwigluLinear
from tests.support.kernels.quantized_cases import interpreted_skinny_gemm, quantized

BF16 = torch.bfloat16
DENSE = [
    SkinnyGemm(64, 256, 3, 132),
    SkinnyGemm(32, 512, 3, 132, split_units=2, x_stages=1),
    SkinnyGemm(16, 512, 4, 7),
]
# Of partial sums, two warpgroups, and stacked runs of columns.
QUANTIZED = [
    SkinnyQuantizedGemm(64, 256, 2, 4, x_stages=2),
    SkinnyQuantizedGemm(128, 256, 2, 3, x_stages=1, sync=True),
    SkinnyQuantizedGemm(32, 512, 2, 3, split_units=2, x_stages=1, sync=True),
    SkinnyQuantizedGemm(16, 1024, 2, 5, x_stages=1),
]
# Whose warps have columns of their own: of 4 bits, and of multiples of 8 outputs.
APART = [
    SkinnyQuantizedGemm(64, 512, 2, 4, x_stages=2, sync=True, apart=True),
    SkinnyQuantizedGemm(32, 1024, 2, 3, x_stages=1, sync=True, apart=True),
]


@pytest.fixture
def on_cpu() -> Iterator[None]:
    with interpreted_skinny_gemm():
        yield


def numbers(device: str, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(BF16)


def check_gate(gemm: GatingGemm, x: Tensor, weight: Any, plain: Tensor, gate: Gate) -> None:
    """That the error is at most three times that of float32 products, rounded once."""
    bias = numbers(str(x.device.type), len(plain))
    for added in (bias, None):
        y = gemm.multiply(x, weight, added, gate)
        exact = x.double() @ plain.double().T + (0 if added is None else added.double())
        gates, ups = exact.chunk(2, -1)
        exact = (F.silu(gates) if gate == "silu" else F.gelu(gates, approximate="tanh")) * ups
        assert y.shape == exact.shape and y.dtype == x.dtype
        limit = 3 * (exact.to(BF16).double() - exact).norm() + 1e-9
        assert (y.double() - exact).norm() <= limit
        assert torch.equal(gemm.multiply(x, weight, added, gate), y)
    assert int(workspace(x.device)[1].sum()) == 0


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gemm", QUANTIZED, ids=str)
@pytest.mark.parametrize("name", ["int4 g32 zeros", "nvfp4", "fp8 row"])
def test_a_gated_product_of_a_quantized_weight_is_right(gemm: SkinnyQuantizedGemm, name: str):
    weight = quantized(name, 148, 640)  # 74 gates: the last tile has fewer than the others
    check_gate(gemm, numbers("cpu", 3, 640), pack(weight), weight.dequantize(BF16), "silu")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gemm", APART, ids=str)
@pytest.mark.parametrize("name", ["int4 g64 zeros", "nvfp4"])
def test_a_gated_product_of_warps_with_columns_of_their_own_is_right(
    gemm: SkinnyQuantizedGemm, name: str
):
    weight = quantized(name, 152, 1152)  # 76 gates
    check_gate(gemm, numbers("cpu", 3, 1152), pack(weight), weight.dequantize(BF16), "silu")


@pytest.mark.usefixtures("on_cpu")
def test_a_gate_by_gelu_is_right():
    weight = quantized("fp8 row", 96, 512)
    check_gate(QUANTIZED[0], numbers("cpu", 5, 512), pack(weight), weight.dequantize(BF16), "gelu")


def test_a_gate_is_left_to_another_kernel_where_shared_memory_is_full():
    fp8, int4 = pack(quantized("fp8 row", 64, 256)), pack(quantized("int4 g128", 64, 256))
    large = [g for g in skinny_candidates(132, 64, 24576, 4096, 8) if g.block_n == 128]
    assert large and not any(gemm.gates(64, fp8) for gemm in large)
    assert all(gemm.gates(8, int4) for gemm in skinny_candidates(132, 8, 24576, 4096, 4))


def test_all_that_is_tried_of_unquantized_weights_has_room_for_gates():
    weight = torch.empty(0, dtype=BF16)
    for rows in BUCKETS:
        found = gemm_candidates(132, (9, 0), rows, 24576, 4096)
        gating = [gemm for gemm in found if isinstance(gemm, SkinnyGemm)]
        assert gating and all(gemm.gates(rows, weight) for gemm in gating)
    assert not SkinnyGemm(64, 256, 7, 132).gates(8, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", DENSE, ids=str)
@pytest.mark.parametrize("gate", ["silu", "gelu"])
def test_gated_products_are_right(gemm: SkinnyGemm, gate: Gate):
    for outputs, inputs in ((24576, 4096), (2 * 333, 520), (128, 72)):
        weight = numbers("cuda", outputs, inputs) / inputs**0.5
        for rows in (1, 2, 8, 13, 64):
            if gemm.serves(rows, outputs, inputs):
                check_gate(gemm, numbers("cuda", rows, inputs), weight, weight, gate)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["int4 g128", "nvfp4", "fp8 block", "fp8 row"])
def test_gates_of_every_candidate_of_quantized_weights_are_right(name: str):
    weight = quantized(name, 2048, 4096, device="cuda")
    packed, plain = pack(weight), weight.dequantize(BF16)
    bits = 4 if name in ("int4 g128", "nvfp4") else 8
    for rows in (1, 2, 8, 17, 64, 100):
        x = numbers("cuda", rows, 4096)
        for gemm in skinny_candidates(132, rows, 2048, 4096, bits):
            if gemm.gates(rows, packed):
                check_gate(gemm, x, packed, plain, "silu")


@pytest.mark.gpu
def test_a_chain_of_layers_has_the_same_bits_at_each_replay():
    """Each kernel starts while the one before still runs, and reads what its last program wrote."""
    gate_up = SwigluLinear(1024, 2048, bias=False, dtype=BF16).to("cuda")
    down = Linear(2048, 1024, bias=False, dtype=BF16).to("cuda")
    norm = RMSNorm(1024, 1e-6, BF16).to("cuda")
    gate_up.weight.copy_(numbers("cuda", 4096, 1024) / 32)
    down.weight.copy_(numbers("cuda", 1024, 2048) / 45)
    norm.weight.fill_(1)
    first, start = numbers("cuda", 1, 1024), numbers("cuda", 1, 1024)

    def chain() -> Tensor:
        x, residual = first.clone(), start.clone()
        for _ in range(12):
            x, residual = norm.add(*down.add(gate_up.swiglu(x), residual))
        return x

    expected = chain()  # by cuBLAS and separate kernels
    for layer in (gate_up, down):
        layer.use_gemms({1: SkinnyGemm(32, 512, 4, 132)})
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    found = []
    for _ in range(50):
        graph.replay()
        found.append(out.clone())
    assert all(torch.equal(other, found[0]) for other in found)
    assert (found[0].double() - expected.double()).norm() <= 0.05 * expected.double().norm()


class OwnGate(GatingGemm):
    """By PyTorch's operations; `factor` is what its gated output is wrong by."""

    name = "of a test"

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.gated = factor, 0

    def gates(self, rows: int, weight: Any) -> bool:
        return True

    def multiply(self, x: Tensor, weight: Any, bias: Tensor | None, gate: Gate | None) -> Tensor:
        product = F.linear(x, weight, bias)
        if gate is None:
            return product
        self.gated += 1
        gates, ups = product.chunk(2, -1)
        return self.factor * F.silu(gates) * ups


def gated_layer(gemm: GatingGemm) -> SwigluLinear:
    layer = SwigluLinear(16, 24, bias=False, dtype=torch.float32)
    layer.weight.normal_(generator=torch.Generator().manual_seed(0))
    layer.use_gemms({8: gemm})
    return layer


class TakesCodes:
    def input_scales(self, rows: int) -> str:
        return "row"


def test_a_gate_is_computed_by_the_gemm_unless_its_consumer_takes_codes_or_rows_must_not_matter():
    gemm = OwnGate()
    layer, x = gated_layer(gemm), torch.ones(3, 16)

    layer.swiglu(x)
    assert gemm.gated == 1
    layer.swiglu(x, consumer=TakesCodes())  # type: ignore[arg-type]
    assert gemm.gated == 1
    assert layer.gating_gemm(3) is gemm and layer.gating_gemm(9) is None
    layer.is_batch_invariant = True
    assert layer.gating_gemm(3) is None
    layer.swiglu(x)
    assert gemm.gated == 1


class GateOfCodes(OwnGate, QuantizedRowsGemm):
    kind = "row"

    def product(self, x: QuantizedRows, weight: Any, bias: Tensor | None) -> Tensor:
        return self.multiply(x, weight, bias, None)

    def multiply(self, x: Any, weight: Any, bias: Tensor | None, gate: Gate | None) -> Tensor:
        codes = x.codes.float() * x.scales if isinstance(x, QuantizedRows) else x
        return super().multiply(codes, weight, bias, gate)


def test_a_gemm_of_codes_computes_the_gate_whatever_its_consumer_takes():
    gemm = GateOfCodes()
    layer, x = gated_layer(gemm), torch.ones(3, 16)
    codes = QuantizedRows(
        codes=x.to(torch.float8_e4m3fn),
        scales=torch.ones(3, 1),
        kind="row",
        count=3,
        dtype=torch.float32,
    )
    y = layer.swiglu(codes, consumer=TakesCodes())  # type: ignore[arg-type]
    assert gemm.gated == 1 and isinstance(y, Tensor) and y.shape == (3, 24)


@pytest.mark.parametrize(("factor", "kept"), [(1.0, True), (1.2, False), (float("nan"), False)])
def test_a_start_leaves_a_gate_that_is_wrong_to_another_kernel(
    factor: float, kept: bool, caplog: pytest.LogCaptureFixture
):
    first, second = gated_layer(OwnGate(factor)), gated_layer(OwnGate(factor))
    other = Linear(16, 48, bias=False, dtype=torch.float32)  # of the same shape
    assert fused_is_right(8, [other, first, second]) == kept
    assert first.may_gate and second.may_gate, "it was only asked"
    for rows in (8, 16):
        check_fused("48 x 16", rows, [other, first, second])
    assert first.may_gate == second.may_gate == kept
    assert len(caplog.records) == (0 if kept else 1)
    assert kept or "the GEMM's own silu is not used" in caplog.text
