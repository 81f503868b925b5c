"""Quantized checkpoints: whole models against transformers with dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_zoo import loader
from model_zoo.config import ModelError, read_config
from model_zoo.layers import fused_kernels
from model_zoo.layers.gemm.autotune import autotune_gemms
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm.int8.cpu import packs_of
from model_zoo.model import Model
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.quantization.quantized_models import (
    FORMATS,
    shape_config,
    write_quantized,
    write_quantized_hybrid,
)
from tests.support.quantization.rounded_activations import (
    ROUNDED,
    check_errors_on_a_gpu,
    round_activations,
)

CPU = torch.device("cpu")
SLOW = pytest.mark.slow


def packed(model: Model) -> list[Linear]:
    return [m for m in model.modules() if isinstance(m, Linear) and m.packed is not None]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_on_a_cpu_are_those_of_the_dequantized_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loader, "packs_of", lambda device, dtype: False)  # no int8 W8A8
    reference = write_quantized(tmp_path, name)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (40,))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    logits = PagedRow(model, config, torch.float32).feed(tokens)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "name", ["fp8-block", "fp8-tensor", "awq", "gptq", "int4-g32-zeros", "nvfp4"]
)
def test_logits_of_gated_delta_nets_are_those_of_the_dequantized_weights(
    name: str, fused: bool, tmp_path: Path
):
    """The rows of fused projections are put in order, with their scales."""
    reference = write_quantized_hybrid(tmp_path, name, fused=fused)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (40,))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    logits = PagedRow(model, config, torch.float32).feed_in_steps(tokens, [30, 31])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_fp8_while_loading_is_refused_for_a_quantized_checkpoint(tmp_path: Path):
    write_quantized(tmp_path, "awq")
    with pytest.raises(ModelError, match=r"--quantization fp8: .*config\.json.*\(awq\): leave"):
        load_model(
            read_config(tmp_path), tmp_path, dtype=torch.float32, device=CPU, quantization="fp8"
        )


def test_fp8_while_loading_is_refused_without_a_gpu(tmp_path: Path):
    write_checkpoint("qwen3", tmp_path)
    with pytest.raises(ModelError, match="--quantization fp8: a GPU of compute capability 8"):
        load_model(
            read_config(tmp_path), tmp_path, dtype=torch.float16, device=CPU, quantization="fp8"
        )


@pytest.mark.skipif(packs_of(CPU, torch.float32) is False, reason="needs a CPU with VNNI")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["int8-row", "int8-row-zeros"])
def test_int8_on_a_cpu_errs_as_much_as_rounding_explains(
    name: str, dtype: torch.dtype, tmp_path: Path
):
    reference = write_quantized(tmp_path, name)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=dtype, device=CPU)
    assert {str(linear.gemm_of(1).name) for linear in packed(model)} == {"int8 (oneDNN)"}
    assert len(packed(model)) == 8
    tokens = torch.randint(config.vocab_size, (60,))
    with torch.inference_mode():
        exact = reference(tokens[None]).logits[0]
        round_activations(reference.model.layers, ROUNDED[name])
        rounded = reference(tokens[None]).logits[0]
    found = PagedRow(model, config, dtype).feed_in_steps(tokens, [50, 51, 58]).float()
    error, expected = ((logits - exact).abs().mean() for logits in (found, rounded))
    assert 0.5 * expected <= error <= 1.25 * expected, error / expected
    off = (found - rounded).abs().mean()
    assert dtype != torch.float32 or off <= 0.5 * expected, off / expected


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy, for a large negative gate
@pytest.mark.parametrize("name", ["int8-row", pytest.param("int8-row-zeros", marks=SLOW)])
def test_int8_weights_and_activations_err_as_much_as_rounding_explains(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By the kernels, interpreted."""
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)
    monkeypatch.setattr(loader, "packs_of", lambda device, dtype: True)
    reference = write_quantized(tmp_path, name)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float16, device=CPU)
    assert all(
        linear.input_scales(rows) == ROUNDED[name] for linear in packed(model) for rows in (1, 99)
    )
    tokens = torch.randint(config.vocab_size, (9,))
    with torch.inference_mode():
        exact = reference(tokens[None]).logits[0]
        round_activations(reference.model.layers, ROUNDED[name])
        rounded = reference(tokens[None]).logits[0]
    found = PagedRow(model, config, torch.float16).feed_in_steps(tokens, [7, 8]).float()
    error, expected = ((logits - exact).abs().mean() for logits in (found, rounded))
    assert 0.5 * expected <= error <= 1.25 * expected, error / expected
    assert 0.01 <= error / exact.std() <= 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_on_a_gpu_err_no_more_than_dequantized_ones(name: str, tmp_path: Path):
    """Of W8A8: than dequantized ones that are multiplied by rounded activations."""
    reference = write_quantized(tmp_path, name)
    config = read_config(tmp_path)
    cuda = torch.device("cuda")
    model = load_model(config, tmp_path, dtype=torch.bfloat16, device=cuda)
    linears = [m for m in model.modules() if isinstance(m, Linear) and m is not model.head]
    assert packed(model) == linears
    autotune_gemms(model, file=tmp_path / "chosen.json")
    check_errors_on_a_gpu(reference, model, config, name, 1.25)


@pytest.mark.gpu
def test_fp8_while_loading_on_a_gpu_halves_the_memory_of_the_layers(tmp_path: Path):
    shape_config().save_pretrained(tmp_path)
    config = read_config(tmp_path)
    plain, packed = (
        load_model(
            config,
            tmp_path,
            dtype=torch.bfloat16,
            device=torch.device("cuda"),
            load_format="dummy",
            quantization=quantization,
        )
        for quantization in ("auto", "fp8")
    )
    before, after = (
        sum(parameter.nbytes for parameter in model.layers.parameters())
        for model in (plain, packed)
    )
    assert 0.5 <= after / before <= 0.52
