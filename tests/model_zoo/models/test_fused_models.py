"""With fused kernels a model computes what it computes with PyTorch's operations."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attention.backend import Capacity
from attention.dispatch import choose
from model_zoo.config import ModelConfig, read_config
from model_zoo.layers import fused_kernels, linear
from model_zoo.layers.gemm.swiglu import SIZES, SwigluGemm
from model_zoo.layers.swiglu_linear import SwigluLinear
from model_zoo.model import Model
from tests.support.models.loaded_model import load_model
from tests.support.models.model_shapes import QWEN3_8B, shape_of
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import GEMMA_KINDS, KINDS, write_checkpoint
from tests.support.paths import ROOT

CPU = torch.device("cpu")
LENGTH = 40
CUTS = [29, 30, 31]  # a prompt, then steps of one token, then the rest


def on_cpu(kind: str, directory: Path) -> tuple[ModelConfig, Model, Tensor, Tensor]:
    """A tiny model, tokens, and the logits that PyTorch's operations make of them."""
    write_checkpoint(kind, directory)
    config = read_config(directory)
    model = load_model(config, directory, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (LENGTH,))
    return config, model, tokens, PagedRow(model, config, torch.float32).feed_in_steps(tokens, CUTS)


@pytest.mark.parametrize(
    "kind",
    ["qwen3", "llama-yarn", "gpt2", "qwen2-moe", "gpt-oss", "glm4-moe", "qwen3.5", *GEMMA_KINDS],
)
def test_logits_are_those_of_separate_operations_where_kernels_are_interpreted(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # As on a GPU: a weight that is packed for a CPU is no operand of a kernel.
    monkeypatch.setattr(linear, "can_reorder", lambda weight: False)
    config, model, tokens, expected = on_cpu(kind, tmp_path)
    used: list[torch.device] = []
    monkeypatch.setattr(
        fused_kernels, "use_fused_kernels", lambda device: used.append(device) or True
    )
    logits = PagedRow(model, config, torch.float32).feed_in_steps(tokens, CUTS)
    assert (logits - expected).abs().max() <= 1e-5 * expected.abs().max() and used


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash2", "flash1", "mha"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_on_a_gpu_are_those_of_the_cpu(kind: str, attention: str, tmp_path: Path):
    torch.backends.cuda.matmul.allow_tf32 = False
    config, _, tokens, expected = on_cpu(kind, tmp_path)
    device = torch.device("cuda")
    model = load_model(config, tmp_path, dtype=torch.float32, device=device)
    shape, capacity = shape_of(config, torch.float32), Capacity(rows=1, tokens=64)
    windows = tuple(sorted({spec.window for spec in config.attention_specs}))
    backend = choose(device, attention, shape, capacity, windows=windows)
    row = PagedRow(model, config, torch.float32, device="cuda", backend=backend)
    logits = row.feed_in_steps(tokens.to(device), CUTS).cpu()
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("length", [300, 1200])  # of 1200 cuBLAS adds to the residual
@pytest.mark.parametrize("qk_norm", [True, False])
def test_bfloat16_errs_no_more_with_fused_kernels_at_the_shapes_of_a_large_model(
    qk_norm: bool, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(5)
    config, device = replace(QWEN3_8B, qk_norm=qk_norm), torch.device("cuda")
    rounded, exact = (
        load_model(config, tmp_path, dtype=dtype, device=device, load_format="dummy")
        for dtype in (torch.bfloat16, torch.float32)
    )
    for parameter, value in zip(exact.parameters(), rounded.parameters(), strict=True):
        parameter.data.copy_(value)
    tokens = torch.randint(config.vocab_size, (length,), device=device)
    swiglu = [layer for layer in rounded.modules() if isinstance(layer, SwigluLinear)]
    assert swiglu
    if torch.cuda.get_device_capability() == (9, 0):
        for layer in swiglu:
            layer.use_swiglu(dict.fromkeys(SIZES, SwigluGemm()))

    def logits(model: Model, dtype: torch.dtype) -> Tensor:
        backend = choose(device, "flash2", shape_of(config, dtype), Capacity(rows=1, tokens=2048))
        row = PagedRow(model, config, dtype, device="cuda", backend=backend)
        return row.feed_in_steps(tokens, [length - 20, length - 19]).float()

    fused = logits(rounded, torch.bfloat16)
    for layer in swiglu:
        layer.use_swiglu({})
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: False)
    expected, separate = logits(exact, torch.float32), logits(rounded, torch.bfloat16)
    errors = [(found - expected).abs().mean() for found in (fused, separate)]
    assert errors[0] <= 1.1 * errors[1] and errors[1] < 0.05 * expected.abs().mean()


def test_models_need_no_triton_where_they_do_not_fuse():
    """On a CPU neither the package nor a kernel of ours is loaded."""
    code = (
        "import sys, torch; import model_zoo.models.llama, model_zoo.models.gpt2\n"
        "from model_zoo.layers.fused_kernels import use_fused_kernels\n"
        "assert not use_fused_kernels(torch.device('cpu'))\n"
        "found = [m for m in sys.modules if m == 'triton' or 'kernels' in m.split('.')]\n"
        "assert not found, found"
    )
    root = ROOT
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
