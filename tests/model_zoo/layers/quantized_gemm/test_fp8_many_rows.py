"""GEMMs of many rows in fp8: interpreted, and on a GPU, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.gemm import bands
from model_zoo.layers.gemm.implementations import Gate
from model_zoo.layers.quantized_gemm.fp8.many_rows import Fp8ManyRowsGemm
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight, pack
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import QuantizedRows
from model_zoo.layers.swiglu_linear import SwigluLinear
from model_zoo.quantization.weight_scheme import WeightScheme
from tests.support.interpreter.gluon_interpreter import interpreted
from tests.support.kernels.quantized_cases import quantized

BF16, FP16 = torch.bfloat16, torch.float16
GATES: tuple[Gate | None, ...] = (None, "silu", "gelu")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a device of three processors, whose programs compute several tiles each."""
    monkeypatch.setattr(bands, "processors", lambda device: 3)
    folder = "model_zoo.layers"
    modules = (
        f"{folder}.gemm.hopper.gate",
        f"{folder}.gemm.hopper.many_rows",
        f"{folder}.quantized_gemm.hopper.fp8_many_rows",
    )
    with interpreted("fp8_many_rows", *modules):
        yield


def numbers(device: str, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def gated(y: Tensor, gate: Gate | None) -> Tensor:
    if gate is None:
        return y
    gates, ups = y.chunk(2, -1)
    return (F.silu(gates) if gate == "silu" else F.gelu(gates, approximate="tanh")) * ups


def wide_sums(codes: Tensor, weight: PackedWeight) -> Tensor:
    """codes W^T as torch._scaled_mm adds on a GPU, with one scale for all, in float64."""
    of_weight, scales = weight.words.view(torch.float8_e4m3fn), weight.scales.view(1, -1).double()
    if codes.device.type != "cuda":
        return codes.double() @ of_weight.double().T * scales
    one, rows = torch.ones((), device=codes.device), -(-len(codes) // 16) * 16
    padded = F.pad(codes.view(torch.uint8), (0, 0, 0, rows - len(codes)))
    sums = torch._scaled_mm(
        padded.view(torch.float8_e4m3fn), of_weight.t(), one, one, out_dtype=torch.float32,
        use_fast_accum=True,
    )  # fmt: skip
    return sums[: len(codes)].double() * scales


def check(
    device: str, rows: int, outputs: int, inputs: int, gate: Gate | None, dtype: torch.dtype = BF16
) -> None:
    """That the error is that of one rounding and of the tensor cores' sums, which have few bits."""
    weight = pack(quantized("fp8 row", outputs, inputs, device=device))
    sizes = torch.logspace(-6, -2, rows, base=2, device=device)[:, None]  # scales that differ
    x = quantize_rows((numbers(device, dtype, rows, inputs) * sizes).to(dtype), "row")
    wide = x.codes[:rows].double() * x.scales[:rows].double()
    codes = weight.words.view(torch.float8_e4m3fn).double()  # in the order of x's
    exact = gated(wide @ (codes * weight.scales.view(-1, 1).double()).T, gate)
    y = Fp8ManyRowsGemm().multiply(x, weight, None, gate)
    assert y.shape == exact.shape and y.dtype == dtype
    rounding = (exact.to(dtype).double() - exact).norm()
    coarse = gated(wide_sums(x.codes[:rows], weight) * x.scales[:rows].double(), gate)
    off = 1.5 * (coarse - exact).norm() + 1e-5 * exact.norm()
    assert (y.double() - exact).norm() <= 2 * rounding + off
    errors = (y.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.max() <= 0.02, "of a row"


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("gate", GATES)
def test_products_and_gates_are_those_of_the_dequantized_operands(gate: Gate | None):
    check("cpu", 140, 544, 576, gate)


@pytest.mark.usefixtures("on_cpu")
def test_rows_of_padding_are_not_stored():
    stored = quantized("fp8 row", 272, 512, device="cpu")
    x = quantize_rows(numbers("cpu", BF16, 130, 512), "row")
    padded = QuantizedRows(
        codes=torch.cat([x.codes.view(torch.uint8), torch.full((14, 512), 127).byte()]).view(
            torch.float8_e4m3fn
        ),
        scales=F.pad(x.scales, (0, 0, 0, 14)),
        kind="row",
        count=130,
        dtype=BF16,
    )
    gemm = Fp8ManyRowsGemm()
    assert torch.equal(
        gemm.product(padded, pack(stored), None), gemm.product(x, pack(stored), None)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_all_sizes_are_as_exact_as_the_tensor_cores(gate: Gate | None, dtype: torch.dtype):
    for outputs, inputs in ((6144, 4096), (4096, 12288), (544, 576), (1008, 1088)):
        for rows in (1, 65, 128, 500, 1667):
            check("cuda", rows, outputs, inputs, gate, dtype)


@pytest.mark.gpu
def test_a_large_model_and_many_rows():
    for gate in (None, "silu"):
        check("cuda", 8192, 24576, 4096, gate)


@pytest.mark.gpu
def test_a_captured_chain_gives_the_same_bits_at_each_replay():
    """Gate and up, down, and again: kernels that begin before the one before them ends."""
    gemm, x = Fp8ManyRowsGemm(), numbers("cuda", BF16, 1000, 1024)
    up, down = (pack(quantized("fp8 row", *shape, device="cuda")) for shape in SHAPES)

    def chain() -> Tensor:
        y = x
        for _ in range(4):
            y = gemm.run(gemm.multiply(y, up, None, "silu"), down, None)
            y = y / y.float().square().mean(1, keepdim=True).sqrt().to(BF16)
        return y

    expected = chain().clone()
    assert expected.isfinite().all()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


SHAPES = ((2 * 2048, 1024), (1024, 2048))


@pytest.mark.gpu
def test_a_gated_layer_uses_it_and_its_consumer_quantizes():
    of_weight = WeightScheme(
        kind="fp8", row_group=1, column_group=1024, scale_dtype=BF16, activation_bits=8
    )
    with torch.device("cuda"):
        layer = SwigluLinear(1024, 2048, bias=False, dtype=BF16, scheme=of_weight)
    assert layer.packed is not None
    stored = quantized("fp8 row", 4096, 1024, device="cuda", scales=BF16)
    layer.packed.store(0, stored)
    layer.use_gemms({}, Fp8ManyRowsGemm())
    x = numbers("cuda", BF16, 300, 1024)
    exact = gated(x.double() @ stored.dequantize(BF16).double().T, "silu")
    for given in (x, quantize_rows(x, "row")):
        y = layer.swiglu(given, consumer=layer)
        assert isinstance(y, Tensor)
        assert (y.double() - exact).norm() <= 0.06 * exact.norm()
