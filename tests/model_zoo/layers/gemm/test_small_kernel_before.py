"""How GEMMs are timed: the kernel before, which layers autotuning tells apart by it, how often."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from attention.common.dependent_launch import can_depend
from model_zoo.config import read_config
from model_zoo.layers.attention import Attention
from model_zoo.layers.gemm import autotune, timing
from model_zoo.layers.gemm.autotune import layers_by_key
from model_zoo.layers.gemm.implementations import BUCKETS, Gate, GatingGemm
from model_zoo.layers.gemm.timing import MIN_CALLS, SMALL_CALLS, SmallKernel, calls_of
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm import candidates, fp8_gemm
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight, pack
from model_zoo.layers.quantized_rows import (
    Producer,
    QuantizedRows,
    QuantizedRowsGemm,
    UnscaledGemm,
    UnscaledRows,
)
from model_zoo.quantization.weight_scheme import WeightScheme
from model_zoo.registry import build
from tests.support.kernels.quantized_cases import quantized
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.quantization.w8a8_models import SeparatelyQuantized, scheme, use_scaled_mm

BF16 = torch.bfloat16


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("after", ["norm", "silu_mul", None])
def test_a_gemm_is_timed_with_the_kernel_that_quantizes_its_x(
    after: Producer | None, hopper: bool, device: str, monkeypatch: pytest.MonkeyPatch
):
    """Behind attention, as behind other kernels that cannot, x is quantized by a kernel more: on
    Hopper also behind few gates and ups, whose GEMM computes silu_mul."""
    use_scaled_mm(monkeypatch, device)
    monkeypatch.setattr(timing, "is_hopper", lambda device: hopper)
    passes: list[tuple[int, ...]] = []

    def counted(x: Tensor, kind: str):
        passes.append(tuple(x.shape))
        return quantize_rows(x, kind)

    quantize_rows = fp8_gemm.quantize_rows
    monkeypatch.setattr(fp8_gemm, "quantize_rows", counted)
    dtype = BF16 if device == "cuda" else torch.float16
    weight, gemm = pack(quantized("fp8 row", 32, 256, device=device)), ScaledMM("row", True)
    torch.manual_seed(0)
    before = SmallKernel(after, 3, 256, dtype=dtype, device=weight.device)
    found = before.run_with(gemm, weight, None)
    separate = after is None or (after == "silu_mul" and hopper)
    assert passes == ([(3, 256)] if separate else [])
    torch.manual_seed(0)
    before = SmallKernel(after, 3, 256, dtype=dtype, device=weight.device)
    assert torch.equal(before.run_with(SeparatelyQuantized(gemm), weight, None), found)
    assert passes[-1] == (3, 256) and found.count_nonzero() > 90


class Recorded:
    """A GEMM of 16 bits."""

    name = "recorded"

    def __init__(self) -> None:
        self.x = torch.empty(0)

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        self.x = x
        return x


def test_a_gemm_of_16_bits_is_timed_with_the_plain_kernel(device: str):
    weight, gemm = pack(quantized("fp8 row", 32, 256, device=device)), Recorded()
    for after in ("norm", "silu_mul", None):
        kernel = SmallKernel(after, 3, 256, dtype=torch.float16, device=weight.device)
        kernel.run_with(gemm, weight, None)
        assert gemm.x.shape == (3, 256) and gemm.x.dtype == torch.float16, after
        assert gemm.x.isfinite().all() and gemm.x.count_nonzero() > 700


class OwnGate(GatingGemm):
    name = "with a gate"

    def gates(self, rows: int, weight: Tensor) -> bool:
        return True

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Gate | None) -> Tensor:
        return x[:, :8] if gate is None else x[:, :4] + 100


def test_a_gated_layer_is_timed_with_its_activation_which_some_gemms_compute(device: str):
    """Of the other GEMMs another kernel does, which halves the columns."""
    weight = torch.zeros(8, 256, dtype=torch.float16, device=device)
    kernel = SmallKernel(None, 3, 256, dtype=torch.float16, device=weight.device)
    assert kernel.run_with(Recorded(), weight, None).shape == (3, 256)
    assert kernel.run_with(Recorded(), weight, None, "silu").shape == (3, 128)
    assert kernel.run_with(OwnGate(), weight, None).shape == (3, 8)
    assert (kernel.run_with(OwnGate(), weight, None, "gelu") > 50).all()


class GateOfCodes(OwnGate, QuantizedRowsGemm):
    kind = "row"

    def product(self, x: QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        raise AssertionError("the gate is computed by the GEMM")

    def multiply(
        self, x: QuantizedRows, weight: PackedWeight, bias: Tensor | None, gate: Gate | None
    ) -> Tensor:
        assert isinstance(x, QuantizedRows) and gate == "silu"
        return x.scales.expand(-1, 4)


def test_a_gemm_of_codes_that_computes_the_gate_is_timed_with_codes(device: str):
    weight = torch.zeros(8, 256, dtype=torch.float16, device=device)
    kernel = SmallKernel("norm", 3, 256, dtype=torch.float16, device=weight.device)
    assert kernel.run_with(GateOfCodes(), weight, None, "silu").shape[1] == 4


def test_layers_of_fp8_activations_are_told_apart_by_the_kernel_before(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(autotune, "supports_kernels", lambda device, dtype: True)
    monkeypatch.setattr(candidates, "runs", lambda gemm, device, dtype: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def layers(of: WeightScheme | None) -> nn.Sequential:
        kernels: tuple[Producer | None, ...] = ("norm", None, "silu_mul")
        return nn.Sequential(
            *(Linear(512, 512, bias=False, dtype=BF16, scheme=of, after=one) for one in kernels)
        )

    keys = list(layers_by_key(layers(scheme("row", 512))))
    assert (
        len({str(gemm_key) for gemm_key in keys})
        == len(keys)
        == 3 * len(BUCKETS + candidates.FP8_BUCKETS)
    )
    assert {gemm_key.after for gemm_key in keys} == {"norm", None, "silu_mul"}
    assert len(layers_by_key(layers(None))) == len(BUCKETS), "in 16 bits they are of one kind"


def test_calls_read_more_than_the_cache_holds_where_there_are_so_many_weights():
    """Of 48 routers of 184 kB none is ever out of the L2 cache, however often they are called."""
    calls = {
        "routers": calls_of(184 << 10, 48, MIN_CALLS),
        "one small layer": calls_of(184 << 10, 1, MIN_CALLS),
        "layers of 5 MiB": calls_of(5 << 20, 64, MIN_CALLS),
        "layers of 360 MiB": calls_of(360 << 20, 64, MIN_CALLS),
    }
    assert list(calls.values()) == [48, SMALL_CALLS, 30, 3]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2-moe", "qwen3.5-moe-text"])
def test_layers_between_attention_and_experts_have_keys_of_their_own(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(autotune, "supports_kernels", lambda device, dtype: True)
    write_checkpoint(kind, tmp_path)
    model = build(read_config(tmp_path), BF16, torch.device("cpu"))
    found = autotune.layers_by_key(model)
    assert len({str(gemm_key) for gemm_key in found}) == len(found), "names in the file"
    between = {
        layer
        for gemm_key, layers in found.items()
        if gemm_key.between_attention_and_experts
        for layer in layers
    }
    outs = {m.out for m in model.modules() if isinstance(m, Attention)}
    assert between == (set() if kind == "qwen3" else outs)


@pytest.mark.gpu
def test_a_gemm_between_attention_and_experts_is_timed_while_its_weights_are_loaded():
    device = torch.device("cuda")
    weight = torch.zeros(8, 256, dtype=BF16, device=device)
    if not can_depend(device):
        pytest.skip("no kernel begins before the one in front of it has ended")

    def microseconds(rows: int) -> float:
        gemm, graph = Recorded(), torch.cuda.CUDAGraph()
        kernel = SmallKernel(None, rows, 256, dtype=BF16, device=device, held=True)
        kernel.run_with(gemm, weight, None)
        assert gemm.x.shape == (rows, 256) and gemm.x.count_nonzero() > 200 * rows
        with torch.cuda.graph(graph):
            for _ in range(100):
                kernel.run_with(gemm, weight, None)
        return timing.replayed_us([graph], 100, 5)[0]

    held, plain = microseconds(3), microseconds(65)
    assert held >= timing.HELD_NS / 1000 and plain < 0.75 * held, "of many rows it is a norm"


@pytest.mark.parametrize("gate", [None, "silu", "gelu"])
def test_the_output_of_many_rows_is_read_where_scales_may_be_left(device: str, gate: Gate | None):
    """By what quantizes it in a step, whether the GEMM leaves them or not."""
    weight = (torch.randn(128, 256, device=device) / 16).to(torch.float16)
    for rows, gemms in ((65, [Halves(), Plain()]), (64, [Plain()])):
        kernel = SmallKernel(
            None, rows, 256, dtype=torch.float16, device=weight.device, leaves_scales=True
        )
        found = [kernel.run_with(gemm, weight, None, gate) for gemm in gemms]
        assert all(isinstance(each, QuantizedRows) == (rows > 64) for each in found)
        assert all(len(each) == rows for each in found)


class Plain:
    name = "plain"

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return (x.float() @ weight.float().T).to(x.dtype)


class Halves(UnscaledGemm):
    """Half of the product, and a scale of 2."""

    name = "halves"
    kind = "row"

    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.unscaled(x, weight).scaled()

    def unscaled(self, x: Tensor | QuantizedRows, weight: Tensor) -> UnscaledRows:
        assert isinstance(x, Tensor)
        twos = torch.full((-(-len(x) // 16) * 16, 1), 2.0, device=x.device)
        ones = torch.ones(len(weight), device=x.device)
        return UnscaledRows(Plain().run(x, weight, None) / 2, twos, ones)
