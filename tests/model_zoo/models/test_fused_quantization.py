"""Activations of 8 bits are quantized by the kernel that computes them, with the same results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model_zoo.config import ModelConfig
from model_zoo.layers import fused_kernels
from model_zoo.layers.gemm.batch_invariant import use_batch_invariant_gemms
from model_zoo.layers.gemm.implementations import GemmImpl
from model_zoo.layers.quantized_rows import QuantizedRows, ScaleKind
from model_zoo.model import Model
from tests.support.models.model_shapes import QWEN3_8B
from tests.support.models.paged_forward import PagedRow
from tests.support.quantization.w8a8_models import (
    SeparatelyQuantized,
    config_of,
    product,
    use_scaled_mm,
    w8a8_linears,
    w8a8_model,
)

LENGTH = 6  # few: the interpreter takes long for each
DENSE = {"qkv", "gate_up", "down"}
# A router needs the norm before it in 16 bits; after it the shared expert's `down` is fused.
FUSED = {"qwen3": DENSE, "gemma2": DENSE, "qwen3.5-text": DENSE, "qwen2-moe": {"qkv", "down"}}


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on a CPU, too, by Triton's interpreter."""
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)


def logits(model: Model, config: ModelConfig, device: str, length: int = LENGTH) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(config.vocab_size, (length,)).to(device)
    row = PagedRow(model, config, dtype_on(device), device=device)
    # A prompt, a step of one token, then of two.
    return row.feed_in_steps(tokens, [length - 3, length - 2])


def dtype_on(device: str) -> torch.dtype:
    """The interpreter cuts bfloat16 off where a GPU rounds."""
    return torch.bfloat16 if device == "cuda" else torch.float16


def use(model: Model, gemm: GemmImpl, few: dict[int, GemmImpl] | None = None) -> None:
    for layer in w8a8_linears(model).values():
        layer.use_gemms(few or {}, gemm)


def quantized_inputs(model: Model) -> dict[str, list[bool]]:
    """For each fp8 Linear, whether x of each call is quantized: filled while the model runs."""
    found: dict[str, list[bool]] = {name: [] for name in w8a8_linears(model)}

    def record(name: str):
        def hook(layer: nn.Module, args: tuple[object, ...]) -> None:
            found[name].append(isinstance(args[0], QuantizedRows))

        return hook

    for name, layer in w8a8_linears(model).items():
        layer.register_forward_pre_hook(record(name))
    return found


@pytest.mark.parametrize(
    "scales",
    ["row", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("block", "int8 zeros"))],
)
@pytest.mark.parametrize("kind", FUSED)
def test_what_a_norm_or_gate_quantizes_has_the_bits_of_a_separate_pass(
    kind: str, scales: ScaleKind, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    use_scaled_mm(monkeypatch, device)
    config = config_of(kind, tmp_path)
    model = w8a8_model(config, scales, dtype_on(device), torch.device(device))
    gemm = product(scales, dtype_on(device), device)
    found = quantized_inputs(model)
    use(model, SeparatelyQuantized(gemm))
    expected = logits(model, config, device)
    assert expected.isfinite().all() and not any(map(any, found.values()))

    for calls in found.values():
        calls.clear()
    use(model, gemm, {1: SeparatelyQuantized(gemm)})
    assert torch.equal(logits(model, config, device), expected)
    prompt, one, two = zip(*found.values(), strict=True)
    assert not any(one) and prompt == two, "the GEMM of so many rows decides"
    names = {name for name, calls in found.items() if any(calls)}
    assert {name.rsplit(".", 1)[1] for name in names} == FUSED[kind]
    # The first one's x is the norm of the embeddings.  The others are those that autotuning times
    # with a kernel that quantizes.
    after = {name for name, layer in w8a8_linears(model).items() if layer.after is not None}
    assert names == after - {"layers.0.attention.qkv"}


def test_deterministic_serving_quantizes_no_activations_to_fp8(tmp_path: Path):
    """A product in fp8 sums in another order for another number of rows."""
    config = config_of("qwen3", tmp_path)
    model = w8a8_model(config, "row", torch.float16, torch.device("cpu"))
    use(model, product("row", torch.float16, "cpu"))
    linears = w8a8_linears(model).values()
    scales = [layer.input_scales(rows) for layer in linears for rows in (1, 64, 5000)]
    assert scales == ["row"] * len(scales)
    use_batch_invariant_gemms(model)
    assert not any(layer.input_scales(rows) for layer in linears for rows in (1, 64, 5000))


def test_deterministic_serving_multiplies_integers_whose_sums_are_exact_in_any_order(
    tmp_path: Path,
):
    model = w8a8_model(config_of("qwen3", tmp_path), "int8", torch.float16, torch.device("cpu"))
    use_batch_invariant_gemms(model)
    linears = w8a8_linears(model).values()
    scales = [layer.input_scales(rows) for layer in linears for rows in (1, 64, 5000)]
    assert scales == ["int8"] * len(scales)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["row", "block", "int8", "int8 zeros"])
@pytest.mark.parametrize("length", [5, 36, 300])
def test_a_large_models_logits_have_the_same_bits(length: int, scales: ScaleKind):
    """Rows of 4096 and 12288 columns, whose sums many threads share."""
    config = replace(QWEN3_8B, vocab_size=1000)
    model = w8a8_model(config, scales, torch.bfloat16, torch.device("cuda"))
    gemm = product(scales, torch.bfloat16, "cuda")
    use(model, SeparatelyQuantized(gemm))
    expected = logits(model, config, "cuda", length)
    use(model, gemm)
    assert torch.equal(logits(model, config, "cuda", length), expected)
