"""The memory estimate of a start: exact where it says so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import FAMILIES
from model_zoo.checkpoint_layers import CheckpointLayers
from model_zoo.config import read_config
from model_zoo.families.delta_net_config import DeltaNetConfig
from model_zoo.layers import fused_kernels
from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net
from model_zoo.layers.delta_net.inputs import MAX_DECODE_TOKENS
from model_zoo.layers.gemm.implementations import workspace
from runtime.config import IMAGE_CACHE_BYTES, ConfigError, EngineConfig
from runtime.memory_plan import MemoryPlan
from runtime.startup import loading
from runtime.startup.fit.target import TargetDevice, memory_plan, resolve_config
from runtime.startup.loading import load
from runtime.startup.memory_estimate import (
    GRAPH_BYTES,
    GRAPH_LAYER_BYTES,
    StepSizes,
    copy_bytes,
    delta_net_bytes,
    estimate,
    parameter_counts,
    weight_bytes,
)
from tests.support.delta_net.cases import delta_net_case
from tests.support.models.loaded_model import load_model
from tests.support.models.model_shapes import QWEN3_8B
from tests.support.models.tiny_checkpoints import write_checkpoint
from tests.support.quantization.quantized_models import write_quantized

MIB = 2**20
STEPS = StepSizes(tokens=8192, rows=256, max_len=40_960, page_size=16)


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama3", "gpt2", "gpt2-untied", "qwen2-moe"])
def test_weights_are_those_of_the_loaded_model(kind: str, tmp_path: Path) -> None:
    write_checkpoint(kind, tmp_path)
    config = read_config(tmp_path)
    model = load_model(
        config, tmp_path, dtype=torch.bfloat16, device=torch.device("cpu"), load_format="dummy"
    )
    found = {id(parameter): parameter.nbytes for parameter in model.parameters()}
    assert weight_bytes(config, torch.bfloat16) >= sum(found.values())  # a CPU packs some away
    assert weight_bytes(config, torch.float32) == 2 * weight_bytes(config, torch.bfloat16)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-tied", "gpt2", "mixtral"])
def test_the_weights_of_a_cpu_are_those_of_its_start(kind: str, tmp_path: Path) -> None:
    """Of an embedding that is the head, too, it keeps both ways to lay it out."""
    write_checkpoint(kind, tmp_path)
    engine_config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", threads=1, kv_tokens=64
    )
    found = load(engine_config, lambda phase, done, total: None).ready.weight_bytes
    config = read_config(tmp_path)
    buffers = 4 * config.head_dim  # frequencies of rotations
    planned = weight_bytes(config, torch.float32) + copy_bytes(config, torch.float32)
    assert 0 <= found - planned <= buffers


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Qwen3-8B", 8.19, 7.57),
        ("Qwen3-4B", 4.02, 4.02),
        ("Mixtral 8x7B", 46.70, 12.75),
        ("Qwen3-30B-A3B", 30.53, 3.04),
        ("gpt-oss-20b", 20.91, 3.61),
        ("gpt-oss-120b", 116.83, 5.13),
    ],
)
def test_parameters_are_as_many_as_published(
    name: str, total: float, active: float, tmp_path: Path
) -> None:
    """Billions; those that are active without the input embeddings."""
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[name]))
    counts = parameter_counts(read_config(tmp_path))
    assert [round(count / 1e9, 2) for count in counts] == [total, active]


def plan_of(**changes: int) -> MemoryPlan:
    config = replace(QWEN3_8B, num_layers=36)
    steps = replace(STEPS, **changes)
    return estimate(config, torch.bfloat16, steps, free=80 << 30, share=0.9)


def test_larger_steps_and_more_sequences_take_more_of_everything() -> None:
    usual = plan_of()
    assert plan_of(tokens=16_384).activations > usual.activations
    fewer = plan_of(rows=64)
    assert fewer.state < usual.state and fewer.graphs < usual.graphs
    assert plan_of(max_len=131_072).state > usual.state


def test_the_plan_of_a_cpu_is_that_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of half of what is free besides the weights."""
    write_checkpoint("qwen3", tmp_path)
    free = [20 * MIB + weight_bytes(read_config(tmp_path), torch.float32), 20 * MIB]
    monkeypatch.setattr(loading, "free_bytes", lambda device: free.pop(0))
    engine_config = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", threads=1)
    started = load(engine_config, lambda phase, done, total: None).resolved
    config = read_config(tmp_path)
    place = TargetDevice("cpu", "", 20 * MIB + weight_bytes(config, torch.float32), "float32")
    planned = resolve_config(engine_config, config, place)
    assert planned.num_pages == started.num_pages < 64 * 32, "not what all slots could use"
    assert planned.max_batched_tokens == started.max_batched_tokens


def test_quantized_weights_and_the_memory_they_are_dequantized_to_are_counted(
    tmp_path: Path,
) -> None:
    plans: dict[str, MemoryPlan] = {}
    for name in ("int4-g128", "fp8-channel"):
        write_quantized(tmp_path / name, name)
        config = read_config(tmp_path / name)
        layers = CheckpointLayers.open(tmp_path / name, None, packs=True)
        plans[name] = estimate(
            config, torch.bfloat16, STEPS, free=80 << 30, share=0.9, scheme_of=layers.scheme_of
        )
    # Two layers of 512 x 512 queries and outputs, 256 keys and values, 1024 gates, ups and downs.
    weights = 2 * 512 * (2 * 512 + 2 * 256 + 3 * 1024)
    difference = plans["fp8-channel"].weights - plans["int4-g128"].weights
    assert weights // 2 - difference == pytest.approx(weights // 128 * 2, rel=0.6)  # the scales
    largest = 2 * 1024 * 512 * torch.bfloat16.itemsize  # gate and up are one layer
    assert plans["int4-g128"].activations - plans["fp8-channel"].activations == largest


def test_the_plan_counts_the_image_encoder_and_its_features(tmp_path: Path) -> None:
    shape = {
        "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
        "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24],
    }  # fmt: skip
    nested = {
        "model_type": "qwen3_vl", "vision_config": shape,
        "text_config": {**FAMILIES["Qwen3-8B"], "rope_scaling": {"mrope_section": [24, 20, 20]}},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(nested))
    seeing = read_config(tmp_path)
    text = replace(seeing, model_type="qwen3", vision=None)
    assert round(parameter_counts(seeing)[0] / 1e9, 2) == 8.77  # as published
    large, small = (replace(STEPS, tokens=256, image_pixels=mega << 20) for mega in (16, 1))
    with_images, without, smaller = (
        estimate(config, torch.bfloat16, steps, free=80 << 30, share=0.9)
        for config, steps in ((seeing, large), (text, large), (seeing, small))
    )
    assert with_images.weights - without.weights == 2 * (
        parameter_counts(seeing)[0] - parameter_counts(text)[0]
    )
    assert with_images.activations > smaller.activations >= without.activations
    # The buffers of the largest step, beside what does not depend on it.
    static = 256 * (4 * 4096 * torch.bfloat16.itemsize + 4 * 8)
    more = replace(STEPS, tokens=512, image_pixels=1 << 20)
    twice = estimate(seeing, torch.bfloat16, more, free=80 << 30, share=0.9)
    assert twice.state - smaller.state == static
    assert smaller.state - without.state > IMAGE_CACHE_BYTES + static
    assert smaller.graphs > without.graphs  # one more for each number of tokens
    # Images of 256 patches are padded to two sizes, larger ones to eight: so many graphs.
    least = replace(more, image_pixels=256 * 256)
    few = estimate(seeing, torch.bfloat16, least, free=80 << 30, share=0.9)
    assert twice.graphs - few.graphs == 6 * (GRAPH_BYTES + 27 * GRAPH_LAYER_BYTES)


def test_all_processes_of_a_cpu_have_weights_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint("qwen3", tmp_path)
    config = read_config(tmp_path)
    weights = weight_bytes(config, torch.float32)
    alone = EngineConfig(model=str(tmp_path), device="cpu", dtype="float32", threads=1)
    two = structs.replace(alone, data_parallel=2)

    def start(engine_config: EngineConfig, host_free: int) -> int:
        """-> bytes of KV"""
        loaded = load(engine_config, lambda phase, done, total: None, host_free=host_free)
        return loaded.ready.kv_bytes

    with pytest.raises(ConfigError, match=r"in each of 2 processes, .* fewer engines"):
        start(two, 2 * weights - 1)
    # What the other engine has not loaded yet is not for KV: a quarter of the rest is for each.
    assert 0 < start(two, 2 * weights + 8 * MIB) <= 2 * MIB
    monkeypatch.setattr(loading, "free_bytes", lambda device: weights + MIB)
    start(two, 0)  # a restart: the other one has its weights already
    monkeypatch.setattr(loading, "free_bytes", lambda device: weights - 1)
    with pytest.raises(ConfigError) as error:
        start(alone, 0)
    assert "fewer engines" not in str(error.value)
    place = TargetDevice("cpu", "", 20 * MIB + 2 * weights, "float32")
    of_two = memory_plan(two, config, place)
    assert memory_plan(alone, config, place).free == 10 * MIB + weights // 2
    assert of_two.free == 5 * MIB


class Allocations(TorchDispatchMode):
    """The bytes of all tensors that are allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.new_empty):
            self.nbytes += found.nbytes
        return found


@pytest.mark.parametrize(
    ("lens", "rows"), [([1] * 40, 40), ([MAX_DECODE_TOKENS], 1), ([320, 192], 2), ([400, 1], 2)]
)
def test_what_gated_delta_nets_allocate_is_counted(
    lens: list[int], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)
    dtype = torch.float16
    # Sizes with which prompts and rows of few tokens take about as much.
    case = delta_net_case(lens, heads=(2, 2), dims=(64, 16), dtype=dtype)
    workspace(case.qkv.device)  # which all layers share
    with Allocations() as found:
        gated_delta_net(*case.arguments)
    net = DeltaNetConfig(layers=(0,), key_heads=2, value_heads=2, key_dim=64, value_dim=16)
    projected = (case.qkv.shape[1] + case.z.shape[1]) * len(case.qkv) * dtype.itemsize
    counted = delta_net_bytes(net, dtype, len(case.qkv), rows)
    assert counted == pytest.approx(projected + found.nbytes, rel=0.15)
