"""Quantized checkpoints loaded for kernels: fused, packed, by several threads, in little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from model_zoo import staging
from model_zoo.checkpoint import Checkpoint
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import ModelError, read_config
from model_zoo.layers.linear import Linear
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.quantized_gemm.packed_weight import E5M3_BIAS, PackedWeight, unpack_codes
from model_zoo.model import Model
from model_zoo.quantization.quantized_weight import QuantizedWeight
from model_zoo.quantization.weight_scheme import WeightScheme
from model_zoo.registry import build
from model_zoo.weight_reader import WeightReader, WeightTarget, read_in_turn
from model_zoo.weight_targets import WeightTargets
from tests.support.quantization.quantized_models import (
    FORMATS,
    write_quantized,
    write_quantized_hybrid,
)

CPU = torch.device("cpu")
AWQ = WeightScheme(
    kind="int4", row_group=1, column_group=128, scale_dtype=torch.float16, zeros=True
)


def load_packed(
    directory: Path, *, quantization: str = "auto", threads: int = 0, chunk_bytes: int = 1000
) -> Model:
    """As a GPU would load it, but for the device; threads: 0 reads in turn."""
    checkpoint, config = Checkpoint.open(directory), read_config(directory)
    layers = CheckpointLayers.open(directory, checkpoint, quantization=quantization, packs=True)
    model = build(config, torch.bfloat16, CPU, layers.scheme_of)
    targets = WeightTargets(model, checkpoint, layers, directory).targets
    if threads:
        reader = WeightReader(targets, CPU, threads=threads, chunk_bytes=chunk_bytes)
        reader.finish(lambda done, total: None)
    else:
        read_in_turn(targets, lambda done, total: None)
    return model


def by_rows(grouped: Tensor) -> Tensor:
    """[groups, N], or [groups / together, N, together] -> [N, groups]."""
    return grouped.movedim(1, 0).reshape(grouped.shape[1], -1)


def unpacked(weight: PackedWeight) -> Tensor:
    """The weight [N, K] float32, without a kernel."""
    scales = weight.scales if weight.row_group > 1 else by_rows(weight.scales)
    if weight.kind == "fp4" and weight.row_scales is None:
        scales = scales.contiguous().view(torch.float8_e8m0fnu)
    elif weight.kind == "fp4":  # a power of two with five bits of exponent, and three of mantissa
        codes = scales.int()
        scales = (1 + (codes & 7) / 8) * 2.0 ** ((codes >> 3) - E5M3_BIAS) * (codes != 0)
    return QuantizedWeight(
        kind=weight.kind,
        codes=unpack_codes(weight.words, weight.kind),
        scales=scales,
        row_group=weight.row_group,
        column_group=weight.column_group,
        zeros=None if weight.zeros is None else by_rows(weight.zeros),
        row_scales=weight.row_scales,
        permutation=weight.permutation,
    ).dequantize(torch.float32)


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_packed_layers_hold_the_numbers_of_the_files(name: str, threads: int, tmp_path: Path):
    reference = write_quantized(tmp_path, name).state_dict()
    model = load_packed(tmp_path, threads=threads)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    assert sum(linear.packed is not None for linear in linears) == len(linears) - 1  # the head
    for linear in linears:
        if linear.packed is None:
            continue
        expected = [reference[f"{part.name}.weight"] for part in linear.projections()]
        torch.testing.assert_close(
            unpacked(linear.packed.weight), torch.cat(expected).float(), rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("threads", [0, 3])
@pytest.mark.parametrize("name", ["fp8-block", "fp8-channel", "awq", "gptq-zeros", "nvfp4"])
def test_rows_of_fused_projections_are_put_in_order(name: str, threads: int, tmp_path: Path):
    """All queries, all keys, all values and all gates, which the files have head after head."""
    reference = write_quantized_hybrid(tmp_path, name, fused=True).state_dict()
    model = load_packed(tmp_path, threads=threads)
    layer = model.layers[0].delta_net
    assert layer.qkvz.packed is not None and layer.ba.packed is None
    found = {"qkvz": unpacked(layer.qkvz.packed.weight), "ba": layer.ba.weight.float()}
    for part, sizes in {"qkvz": [128, 128, 256, 256], "ba": [2, 2]}.items():
        stored = reference[f"model.layers.0.linear_attn.in_proj_{part}.weight"].float()
        kinds = stored.unflatten(0, (2, -1)).split(sizes, 1)
        expected = torch.cat([kind.flatten(0, 1) for kind in kinds])
        near = {"rtol": 1e-5, "atol": 1e-7} if part == "qkvz" else {"rtol": 1e-2, "atol": 0}
        torch.testing.assert_close(found[part], expected, **near)


def test_fp8_while_loading_packs_every_layer_but_the_head(tmp_path: Path):
    sizes = {"n_embd": 128, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    # Which stores its weights transposed.
    GPT2LMHeadModel(GPT2Config(**sizes, eos_token_id=1)).save_pretrained(tmp_path)
    model = load_packed(tmp_path, quantization="fp8", threads=2)
    plain = load_packed(tmp_path)
    linears = [
        [module for module in each.modules() if isinstance(module, Linear)]
        for each in (model, plain)
    ]
    for one, other in zip(*linears, strict=True):
        if other is not plain.head:
            assert one.packed is not None
            torch.testing.assert_close(
                unpacked(one.packed.weight), other.weight.float(), rtol=0.07, atol=1e-3
            )
    assert isinstance(model.head, Linear) and model.head.packed is None


def test_few_layers_are_in_memory_in_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A file has the codes of all layers before the first scale: they are sorted by dtype."""
    write_quantized(tmp_path, "awq")
    targets = targets_of(tmp_path)
    sizes = {target.source.name: target.source.num_bytes for target in targets}
    staged, most = 0, 0
    tensor, release = staging.StagedTensor.tensor, staging.StagedTensor.release

    def counted(self: staging.StagedTensor) -> Tensor:
        nonlocal staged, most
        if self._tensor is None:
            staged += self.source.num_bytes
            most = max(most, staged)
        return tensor(self)

    def counted_release(self: staging.StagedTensor) -> None:
        nonlocal staged
        staged -= self.source.num_bytes
        release(self)

    monkeypatch.setattr(staging.StagedTensor, "tensor", counted)
    monkeypatch.setattr(staging.StagedTensor, "release", counted_release)
    read_in_turn(targets, lambda done, total: None)
    assert staged == 0
    largest = max(size for name, size in sizes.items() if name.endswith("qweight"))
    assert largest <= most < 1.1 * largest


def targets_of(directory: Path) -> list[WeightTarget]:
    checkpoint, config = Checkpoint.open(directory), read_config(directory)
    layers = CheckpointLayers.open(directory, checkpoint, packs=True)
    model = build(config, torch.bfloat16, CPU, layers.scheme_of)
    return WeightTargets(model, checkpoint, layers, directory).targets


def test_the_order_of_columns_is_one_before_the_weights_are_loaded(tmp_path: Path):
    """Kernels are compiled by products that run before, which gather columns by it."""
    write_quantized(tmp_path, "gptq-act-order")
    layers = CheckpointLayers.open(tmp_path, None, packs=True)
    model = build(read_config(tmp_path), torch.bfloat16, CPU, layers.scheme_of)
    orders = [value for name, value in model.named_parameters() if name.endswith("permutation")]
    assert len(orders) == 8
    assert all(torch.equal(order, torch.arange(len(order))) for order in orders)


def test_fused_layers_of_different_schemes_are_dequantized(tmp_path: Path):
    """Of q, k and v, k is stored in 16 bits."""
    reference = write_quantized(tmp_path, "awq").state_dict()
    sources = Checkpoint.open(tmp_path).sources
    name = "model.layers.0.self_attn.k_proj"
    tensors = {key: source.read() for key, source in sources.items() if not key.startswith(name)}
    tensors[f"{name}.weight"] = reference[f"{name}.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = load_packed(tmp_path)
    first, second = (layer.attention.qkv for layer in model.layers)  # type: ignore[union-attr]
    assert second.packed is not None and first.packed is None and first.is_dequantized
    parts = [reference[f"model.layers.0.self_attn.{p}_proj.weight"] for p in "qkv"]
    torch.testing.assert_close(first.weight.float(), torch.cat(parts).float(), rtol=4e-3, atol=1e-5)


def test_layers_with_different_orders_of_columns_are_refused_by_name(tmp_path: Path):
    write_quantized(tmp_path, "gptq-act-order")
    tensors = {key: one.read() for key, one in Checkpoint.open(tmp_path).sources.items()}
    name = "model.layers.1.self_attn.v_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn\.\w_proj: the order of"):
        load_packed(tmp_path)


def test_a_factory_gives_each_linear_the_scheme_of_its_parts():
    asked: list[tuple[dict[str, int], int]] = []

    def scheme_of(parts, inputs):
        asked.append((dict(parts), inputs))
        return AWQ if "q" in parts else None

    linears = LinearFactory(torch.float16, scheme_of)
    qkv = linears.linear(256, {"q": 128, "k": 64, "v": 64}, bias=True)
    up = linears.swiglu(256, 512, "gate", "up", bias=False)
    assert asked == [({"q": 128, "k": 64, "v": 64}, 256), ({"gate": 512, "up": 512}, 256)]
    assert qkv.packed is not None and qkv.packed.scheme == AWQ and qkv.weight.numel() == 0
    assert up.packed is None and up.weight.shape == (1024, 256)
    assert [(p.name, p.first, p.shape) for p in qkv.projections()] == [
        ("q", 0, (128, 256)),
        ("k", 128, (64, 256)),
        ("v", 192, (64, 256)),
    ]
