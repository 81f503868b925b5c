"""Models whose fp8 products are scaled by the kernels that follow them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.config import ModelConfig
from model_zoo.layers import fused_kernels
from model_zoo.layers.gemm.implementations import GemmImpl
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM, UnscaledMM
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_rows import (
    QuantizedRows,
    QuantizedRowsGemm,
    ScaleKind,
    UnscaledRows,
)
from model_zoo.model import Model
from tests.support.models.model_shapes import QWEN3_8B
from tests.support.models.paged_forward import PagedRow
from tests.support.quantization.w8a8_models import (
    config_of,
    product,
    use_scaled_mm,
    w8a8_linears,
    w8a8_model,
)

BF16 = torch.bfloat16
LENGTH = 6  # few: the interpreter takes long for each
STEPS = 3
# Layers whose output is scaled in operations of its own: gates of attention are read as they are,
# and so are inputs of delta nets and of a sum with experts.
SCALED_ALONE = {
    "qwen3": set[str](),
    "gemma2": set[str](),
    "qwen3.5-text": {"qkv", "qkvz", "ba"},
    "qwen2-moe": {"down"},
}


@dataclass(frozen=True)
class ScaledAlone(QuantizedRowsGemm):
    """UnscaledMM whose output is scaled in operations of its own."""

    name: str = "separate"
    kind: ScaleKind = "row"

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        return UnscaledMM().run(x, weight, bias)

    def product(self, x: QuantizedRows, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        return UnscaledMM().product(x, weight, bias)


def logits(model: Model, config: ModelConfig, device: str, length: int = LENGTH) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(config.vocab_size, (length,)).to(device)
    row = PagedRow(model, config, BF16, device=device)
    return row.feed_in_steps(tokens, [length - 3, length - 2])  # a prompt, one token, then two


def use(model: Model, gemm: GemmImpl) -> None:
    for layer in w8a8_linears(model).values():
        layer.prepare()
        layer.use_gemms({}, gemm if layer.bias is None else ScaledMM("row", fast_accum=True))


def cut_off(x: Tensor) -> Tensor:
    """Float32 as bfloat16, as the interpreter has it; a GPU rounds."""
    return (x.contiguous().view(torch.int32) & ~0xFFFF).view(torch.float32).to(BF16)


@pytest.mark.parametrize("kind", SCALED_ALONE)
def test_logits_have_the_same_bits_where_kernels_after_a_product_multiply_its_scales(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)
    use_scaled_mm(monkeypatch, device)
    config = config_of(kind, tmp_path)
    model = w8a8_model(config, "row", BF16, torch.device(device))
    product("row", BF16, device)  # skips where there is none
    alone: list[UnscaledRows] = []

    def scaled(rows: UnscaledRows) -> Tensor:
        alone.append(rows)
        factors = rows.row_scales[: len(rows)] * rows.column_scales.float()
        y = rows.values.float() * factors
        return y.to(BF16) if device == "cuda" else cut_off(y)

    monkeypatch.setattr(UnscaledRows, "scaled", scaled)
    use(model, ScaledAlone())
    expected = logits(model, config, device)
    assert expected.isfinite().all()
    names = [name for name, layer in w8a8_linears(model).items() if layer.bias is None]
    assert len(alone) == len(names) * STEPS
    alone.clear()
    use(model, UnscaledMM())
    assert torch.equal(logits(model, config, device), expected)
    count = sum(name.rsplit(".", 1)[1] in SCALED_ALONE[kind] for name in names)
    assert len(alone) == count * STEPS


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("length", [36, 300])
def test_a_large_models_logits_are_those_of_scaled_products(length: int, exact: bool):
    """exact: scales of columns are read as bfloat16, of which they are numbers"""
    config = replace(QWEN3_8B, vocab_size=1000)
    model = w8a8_model(config, "row", BF16, torch.device("cuda"))
    for layer in w8a8_linears(model).values():
        assert layer.packed is not None
        if not exact:
            layer.packed.weight.scales.mul_(1.001)
        layer.prepare()
        assert (layer.packed.weight.narrow_scales is not None) == exact
    use(model, ScaledAlone())
    expected = logits(model, config, "cuda", length)
    use(model, UnscaledMM())
    assert torch.equal(logits(model, config, "cuda", length), expected)
    use(model, ScaledMM("row", fast_accum=True))
    others = logits(model, config, "cuda", length).double()
    # Sums are rounded once more, which changes some codes of the next product.
    assert (others - expected.double()).norm() < 0.1 * others.norm()
