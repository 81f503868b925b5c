"""Quantized checkpoints with experts: against transformers with dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo import loader
from model_zoo.checkpoint import Checkpoint
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import read_config
from model_zoo.layers.gemm.autotune import autotune_gemms
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe.autotune import autotune_experts
from model_zoo.layers.moe.block import MoE
from model_zoo.layers.moe.experts import ExpertNames, Experts
from model_zoo.layers.moe.run import run_experts
from model_zoo.layers.moe.tiles import ExpertTiles, ProductTile
from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.layers.quantized_gemm.stacked_parameters import pad_columns
from model_zoo.loader import fill_randomly
from model_zoo.model import Model
from model_zoo.moe_config import MoEConfig, RouterConfig
from model_zoo.quantization.quantize import quantize_fp8
from model_zoo.quantization.weight_scheme import WeightScheme
from model_zoo.registry import build
from model_zoo.weight_reader import read_in_turn
from model_zoo.weight_targets import WeightTargets
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.quantization.quantized_models import FORMATS, write_quantized_experts
from tests.support.quantization.rounded_activations import check_errors_on_a_gpu

CPU = torch.device("cpu")
TILES = ExpertTiles.of(16, ProductTile(32, 128), ProductTile(64, 128))
CORNERS = ("fp8-block", "fp8-channel", "int4-g32-zeros", "nvfp4", "mxfp4-compressed-tensors")


@pytest.mark.parametrize("name", FORMATS)
def test_logits_on_a_cpu_are_those_of_the_dequantized_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loader, "packs_of", lambda device, dtype: False)  # no int8 W8A8
    reference = write_quantized_experts(tmp_path, name)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.float32, device=CPU)
    tokens = torch.randint(config.vocab_size, (40,))
    with torch.inference_mode():
        expected = reference(tokens[None]).logits[0]
    logits = PagedRow(model, config, torch.float32).feed(tokens)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


def packed_model(directory: Path, dtype: torch.dtype, quantization: str = "auto") -> Model:
    """The model with packed weights, as on a GPU; its Linears have no GEMM."""
    checkpoint = Checkpoint.open(directory)
    layers = CheckpointLayers.open(directory, checkpoint, quantization=quantization, packs=True)
    model = build(read_config(directory), dtype, CPU, layers.scheme_of)
    targets = WeightTargets(model, checkpoint, layers, directory)
    read_in_turn(targets.targets, lambda done, total: None)
    return model


@pytest.mark.parametrize(
    "name",
    [n if n in CORNERS else pytest.param(n, marks=pytest.mark.slow) for n in FORMATS],
)
def test_packed_experts_are_read_into_their_places(name: str, tmp_path: Path):
    reference = write_quantized_experts(tmp_path, name)
    experts = packed_model(tmp_path, torch.float16).experts()[1]
    assert experts.is_packed == (name != "gptq-act-order")  # whose order differs by expert
    x = torch.randn(3, 256) / 4
    ids = torch.tensor([[0, 3], [2, 3], [1, 0]], dtype=torch.int32)
    weights = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.7, 0.3]])
    y = run_experts(experts, x.half(), ids, weights, tiles=TILES)
    module = reference.get_submodule("model.layers.1.mlp.experts")
    with torch.inference_mode():
        expected: Tensor = module(x, ids.long(), weights)
    assert (y.float() - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize("name", ["fp8-block", "int4-g128"])
def test_random_weights_of_packed_experts_differ_and_are_finite(name: str, tmp_path: Path):
    write_quantized_experts(tmp_path, name)
    model = packed_model(tmp_path, torch.float16)
    fill_randomly(model)
    stack = model.experts()[1].down.packed
    assert stack is not None
    first, second = (stack.of(expert) for expert in (0, 1))
    assert not torch.equal(first.words, second.words)
    values = torch.empty(2, *first.shape)
    for weight, value in zip((first, second), values, strict=True):
        dequantize_into(weight, value)
    assert values.isfinite().all() and 0.01 < values.std() < 0.04


def test_fp8_while_loading_leaves_the_router_unquantized(tmp_path: Path):
    reference = write_checkpoint("qwen2-moe", tmp_path)
    model = packed_model(tmp_path, torch.float16, quantization="fp8")
    weights = dict(reference.named_parameters())
    for index, (layer, experts) in enumerate(zip(model.layers, model.experts(), strict=True)):
        mlp = layer.mlp
        assert isinstance(mlp, MoE) and mlp.router.linear.packed is None
        gate = weights[f"model.layers.{index}.mlp.gate.weight"]
        assert torch.equal(mlp.router.weight, gate.half())
        assert mlp.router.shared_gate_weight is not None
        assert experts.gate_up.packed is None, "K of 64 has no whole block"


def test_experts_in_one_tensor_are_quantized_while_loading_as_those_in_many(tmp_path: Path):
    """In the layout of each architecture: outputs first or last, gates and ups in turn or not."""
    moe = MoEConfig(router=RouterConfig(num_experts=3, top_k=2), intermediate_size=64)
    scheme = WeightScheme(kind="fp8", row_group=1, column_group=64, scale_dtype=torch.float32)
    factory = LinearFactory(torch.float16, lambda parts, inputs: scheme)
    weights = {"gate_up_proj": torch.randn(3, 128, 64), "down_proj": torch.randn(3, 64, 64)}
    for transposed, interleaved in ((False, False), (True, False), (True, True)):
        names = ExpertNames("experts", transposed=transposed, interleaved=interleaved)
        experts = Experts(moe, 64, names, factory)
        for name, tensor in experts.stacked_tensors().items():
            part = name.partition(".")[2]
            stored = weights[part]
            if interleaved and part == "gate_up_proj":
                stored = stored.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            stored = stored.transpose(1, 2) if transposed else stored
            assert tensor.shape == tuple(stored.shape) and tensor.place is None
            tensor.quantize(stored.contiguous())
        for part, stack in (("gate_up_proj", experts.gate_up), ("down_proj", experts.down)):
            for expert, weight in enumerate(weights[part]):
                expected = pack(pad_columns(quantize_fp8(weight), 128))
                assert stack.packed is not None
                assert torch.equal(stack.packed.of(expert).words, expected.words)
                assert torch.equal(stack.packed.of(expert).scales, expected.scales)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_packed_experts_on_a_gpu_err_no_more_than_dequantized_ones(name: str, tmp_path: Path):
    reference = write_quantized_experts(tmp_path, name)
    config = read_config(tmp_path)
    model = load_model(config, tmp_path, dtype=torch.bfloat16, device=torch.device("cuda"))
    autotune_gemms(model, file=tmp_path / "chosen.json")
    autotune_experts(model, file=tmp_path / "chosen.json")
    check_errors_on_a_gpu(reference, model, config, name, 1.5)
