"""Models of random weights of 8 bits and activations of 8 bits, fp8 or int8, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.config import ModelConfig, read_config
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm.candidates import runs
from model_zoo.layers.quantized_gemm.fp8_gemm import ScaledMM
from model_zoo.layers.quantized_gemm.int8.gemm import Int8GemmByRows
from model_zoo.layers.quantized_gemm.packed_weight import PackedWeight
from model_zoo.layers.quantized_rows import GROUP, ScaleKind
from model_zoo.loader import fill_randomly
from model_zoo.model import Model
from model_zoo.quantization.weight_scheme import WeightScheme
from model_zoo.registry import build
from tests.support.models.tiny_checkpoints import write_checkpoint

# cuBLAS takes block scales of multiples of 512 columns.
SIZES = {"hidden_size": 512, "intermediate_size": 512, "num_layers": 2, "max_position": 64}
HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}


def scheme(scales: ScaleKind, columns: int) -> WeightScheme:
    """W8A8."""
    blocks = scales == "block"
    integers = scales in ("int8", "int8 zeros")
    return WeightScheme(
        kind="int8" if integers else "fp8",
        row_group=GROUP if blocks else 1,
        column_group=GROUP if blocks else columns,
        scale_dtype=torch.float32,
        activation_bits=8,
        activation_zeros=scales == "int8 zeros",
    )


def config_of(kind: str, directory: Path) -> ModelConfig:
    """Of a kind of tiny_checkpoints.py, with sizes that fp8 products take."""
    write_checkpoint(kind, directory)
    config = read_config(directory)
    config = replace(config, **SIZES, **HEADS, windows=config.windows[: SIZES["num_layers"]])
    if config.delta_net is not None:
        heads = {"key_heads": 8, "value_heads": 16}
        config = replace(config, delta_net=replace(config.delta_net, layers=(0,), **heads))
    if config.moe is None:
        return config
    router = replace(config.moe.router, num_experts=2, top_k=1)
    moe = replace(config.moe, router=router, intermediate_size=16, shared_size=512)
    return replace(config, moe=moe)


def w8a8_model(
    config: ModelConfig, scales: ScaleKind, dtype: torch.dtype, device: torch.device
) -> Model:
    """All Linears but the head are of 8 bits; experts and the router are not."""

    def scheme_of(parts: Mapping[str, int], inputs: int) -> WeightScheme | None:
        plain = any(name == "lm_head" or ".experts." in name for name in parts)
        return None if plain else scheme(scales, inputs)

    torch.manual_seed(7)
    model = build(config, dtype, device, scheme_of).eval()
    fill_randomly(model)
    return model


def w8a8_linears(model: Model) -> dict[str, Linear]:
    named = model.named_modules()
    return {n: m for n, m in named if isinstance(m, Linear) and m.packed is not None}


@dataclass(frozen=True)
class SeparatelyQuantized:
    """A GEMM that quantizes its x itself, as every GEMM that takes 16 bits would."""

    gemm: ScaledMM | Int8GemmByRows
    name: str = "separate"

    def run(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        return self.gemm.run(x, weight, bias)


def product(scales: ScaleKind, dtype: torch.dtype, device: str) -> ScaledMM | Int8GemmByRows:
    """What the device has; the test is skipped if it has none."""
    if scales in ("int8", "int8 zeros"):
        return Int8GemmByRows(scales)
    gemm = ScaledMM(scales, fast_accum=scales == "row")
    if device == "cuda" and not runs(gemm, torch.device(device), dtype):
        pytest.skip(f"no fp8 product by {scales} scales here")
    return gemm


def use_scaled_mm(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """On a CPU in place of torch._scaled_mm, whose kinds of scales there depend on the version."""
    if device == "cpu":
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def scaled_mm(
    x: Tensor, weight: Tensor, x_scales: Tensor, scales: Tensor, bias: Tensor | None,
    *, out_dtype: torch.dtype, use_fast_accum: bool,
) -> Tensor:  # fmt: skip
    """x [M, K] e4m3, weight [K, N] e4m3, and scales of rows or of blocks -> x weight [M, N]."""
    assert bias is None and isinstance(use_fast_accum, bool)
    return (spread(x_scales, x) @ spread(scales, weight)).to(out_dtype)


def spread(scales: Tensor, codes: Tensor) -> Tensor:
    """codes [A, B] times their scales [a, b], each of which is of A / a by B / b codes."""
    for dim in (0, 1):
        scales = scales.repeat_interleave(codes.shape[dim] // scales.shape[dim], dim)
    return scales * codes.float()
