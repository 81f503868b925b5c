"""Norms that GEMMs of few rows compute: which ones, and that the logits stay what they were."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_zoo.config import ModelConfig, read_config
from model_zoo.layers.delta_net.block import DeltaNet
from model_zoo.layers.gemm.check_fused import check_fused, fused_is_right
from model_zoo.layers.gemm.implementations import BUCKETS, SkinnyGemm
from model_zoo.layers.linear import Linear
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.normed_rows import NormedRows
from model_zoo.layers.row_parallel import RowParallelLinear
from model_zoo.layers.swiglu_linear import SwigluLinear
from model_zoo.loader import fill_randomly
from model_zoo.model import Model
from model_zoo.parallel.communicator import Communicator
from model_zoo.parallel.shard import Shard
from model_zoo.registry import build
from tests.support.gemm.counting_gemm import CountingGemm
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_checkpoints import HYBRID_KINDS, write_checkpoint
from tests.support.quantization.w8a8_models import config_of

LENGTH = 7
STEPS = 3  # of `logits`


def model_of(kind: str, directory: Path, dtype: torch.dtype, device: str) -> tuple[Model, Any]:
    if kind in HYBRID_KINDS:
        write_checkpoint(kind, directory)
        config = read_config(directory)
    else:
        config = config_of(kind, directory)
    model = build(config, dtype, torch.device(device)).eval()
    fill_with_norms(model)
    return model, config


def fill_with_norms(model: Model) -> None:
    torch.manual_seed(7)
    fill_randomly(model)
    for norm in model.modules():
        if isinstance(norm, RMSNorm):  # all ones would hide a norm by another one's weight
            norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)


def use_counting_gemm(model: Model) -> CountingGemm:
    """In all Linears of its layers."""
    gemm = CountingGemm()
    for layer in layers_of(model):
        layer.use_gemms(dict.fromkeys(BUCKETS, gemm))
    return gemm


def layers_of(model: Model) -> list[Linear]:
    """But the head."""
    return [m for n, m in model.named_modules() if isinstance(m, Linear) and "layers." in n]


def nets_of(model: Model) -> list[DeltaNet | None]:
    """By layers."""
    return [getattr(layer, "delta_net", None) for layer in model.layers]


def logits(model: Model, config: ModelConfig, dtype: torch.dtype, device: str) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(config.vocab_size, (LENGTH,)).to(device)
    row = PagedRow(model, config, dtype, device=device)
    return row.feed_in_steps(tokens, [LENGTH - 3, LENGTH - 2])  # a prompt, one token, then two


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5-text"])
def test_gemms_of_a_layer_add_to_the_residual_and_compute_the_norms(kind: str, tmp_path: Path):
    """All but the norm of the embeddings and the last one."""
    model, config = model_of(kind, tmp_path, torch.float32, "cpu")
    expected = logits(model, config, torch.float32, "cpu")
    gemm = use_counting_gemm(model)
    found = logits(model, config, torch.float32, "cpu")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    layers = len(model.layers)
    assert gemm.done.count("add") == (2 * layers - 1) * STEPS
    of_norms = [what for what in gemm.done if what.startswith("norm")]
    second = sum(bool(net and net.ba) for net in nets_of(model)[1:])  # that read a norm, too
    assert len(of_norms) == (2 * layers - 1 + second) * STEPS


def test_layers_of_a_shortened_model_compute_the_norms_of_those_that_follow_in_it(tmp_path: Path):
    """A GPU's first steps run so: without the layers between some of them."""
    write_checkpoint("qwen3.5-text", tmp_path)
    path = tmp_path / "config.json"
    kinds = [*["linear_attention"] * 3, "full_attention"] * 3
    values = json.loads(path.read_text()) | {"layer_types": kinds, "num_hidden_layers": 12}
    path.write_text(json.dumps(values))
    config = read_config(tmp_path)
    model = build(config, torch.float32, torch.device("cpu")).eval()
    fill_with_norms(model)
    whole, layers = logits(model, config, torch.float32, "cpu"), list(model.layers)
    with model.shortened():
        assert [layers.index(layer) for layer in model.layers] == [0, 1, 3, 7]
        expected = logits(model, config, torch.float32, "cpu")
        gemm = use_counting_gemm(model)
        found = logits(model, config, torch.float32, "cpu")
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert gemm.done.count("add") == 7 * STEPS
    use_counting_gemm(model)
    found = logits(model, config, torch.float32, "cpu")
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-4)


def test_the_first_layers_run_by_themselves_and_then_all_again(tmp_path: Path):
    model, config = model_of("qwen3", tmp_path, torch.float32, "cpu")
    whole, layers = logits(model, config, torch.float32, "cpu"), list(model.layers)
    assert len(layers) > 1
    with model.first_layers(1):
        assert list(model.layers) == layers[:1]
        with model.shortened():
            logits(model, config, torch.float32, "cpu")
        assert list(model.layers) == layers[:1]
        part = logits(model, config, torch.float32, "cpu")
    assert not torch.equal(part, whole)
    torch.testing.assert_close(logits(model, config, torch.float32, "cpu"), whole)
    with model.first_layers(100):
        assert list(model.layers) == layers


@pytest.mark.parametrize("kind", ["qwen2-moe", "qwen3.5-moe-text", "gemma2", "gpt2"])
def test_other_norms_have_a_kernel_of_their_own(kind: str, tmp_path: Path):
    """Of which a router reads the output, or which are around the sum, or LayerNorms."""
    if kind == "gpt2":
        pytest.importorskip("transformers")
    model, config = model_of(kind, tmp_path, torch.float32, "cpu")
    expected = logits(model, config, torch.float32, "cpu")
    gemm = use_counting_gemm(model)
    torch.testing.assert_close(
        logits(model, config, torch.float32, "cpu"), expected, rtol=1e-4, atol=1e-4
    )
    assert not gemm.done


def test_batch_invariant_layers_leave_norms_to_a_kernel(tmp_path: Path):
    model, _ = model_of("qwen3", tmp_path, torch.float32, "cpu")
    layer = layers_of(model)[0]
    layer.use_gemms(dict.fromkeys(BUCKETS, CountingGemm()))
    assert layer.takes_normed(2) and not layer.takes_normed(65)
    layer.is_batch_invariant = True
    assert not layer.takes_normed(2)


def test_norms_in_float16_have_a_kernel_since_a_weighted_sum_may_be_too_large(tmp_path: Path):
    model, _ = model_of("qwen3", tmp_path, torch.float16, "cpu")
    layer = layers_of(model)[0]
    layer.use_gemms(dict.fromkeys(BUCKETS, CountingGemm()))
    assert not layer.takes_normed(2)


class Wrong(CountingGemm):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def add_to(self, residual: Tensor, *args: Any) -> NormedRows:
        normed = super().add_to(residual, *args)
        if self.what == "sum":
            residual *= 1.2
        if self.what in ("squares", "weighted"):
            return replace(normed, **{self.what: 1.2 * getattr(normed, self.what)})
        return normed

    def multiply(self, x: Any, weight: Tensor, bias: Tensor | None, gate: Any) -> Tensor:
        if isinstance(x, NormedRows):
            mean = x.squares.sum(0) / x.weighted.shape[1]
            if self.what == "no factor":
                x = x.weighted
            elif self.what == "one factor":
                x = x.weighted * mean[0].rsqrt()
            elif self.what == "bias before the factor":
                bias = None if bias is None else bias * mean.rsqrt()[:, None]
        y = super().multiply(x, weight, bias, gate)
        return y * math.nan if self.what == "norm" and isinstance(x, NormedRows) else y


class NoOtherRanks(Communicator):
    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("each rank checks the GEMMs that it has chosen, alone")


def test_a_start_checks_layers_of_which_ranks_have_parts_without_the_others():
    factory = LinearFactory(torch.float32, shard=Shard(0, 2), communicator=NoOtherRanks())
    layer = factory.row(16, {"down": 48}, bias=False)
    assert isinstance(layer, RowParallelLinear)
    layer.weight.normal_(generator=torch.Generator().manual_seed(0))
    layer.use_gemms({8: CountingGemm()})
    check_fused("48 x 16", 8, [layer])
    assert layer.may_norm


def test_a_start_checks_the_gate_of_a_norm():
    layer = SwigluLinear(16, 24, bias=False, dtype=torch.float32)
    layer.weight.normal_(generator=torch.Generator().manual_seed(0))
    gemm = CountingGemm()
    layer.use_gemms({8: gemm})
    check_fused("48 x 16", 8, [layer])
    assert layer.may_norm and "norm and gate" in gemm.done


WRONG = ["sum", "squares", "weighted", "norm", "no factor", "one factor", "bias before the factor"]


@pytest.mark.parametrize("what", ["", *WRONG])
def test_a_start_leaves_norms_that_are_wrong_to_another_kernel(
    what: str, caplog: pytest.LogCaptureFixture
):
    layers = [Linear(48, 48, bias=True, dtype=torch.float32) for _ in range(2)]
    for layer in layers:
        layer.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        assert layer.bias is not None
        layer.bias.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
        layer.use_gemms({8: Wrong(what)})
        layer.precedes(RMSNorm(48, 1e-6, torch.float32), layer)
    assert fused_is_right(8, layers) == (not what)
    assert all(layer.may_norm for layer in layers), "it was only asked"
    check_fused("48 x 48", 8, layers)
    assert [layer.may_norm for layer in layers] == [not what] * 2
    assert ("the GEMM's own norms are not used" in caplog.text) == bool(what)


@pytest.mark.parametrize("without", ["qkv", "out", "gate_up", "down"])
def test_a_gemm_adds_where_the_next_one_takes_what_it_leaves_of_the_norm(
    without: str, tmp_path: Path
):
    model, config = model_of("qwen3", tmp_path, torch.float32, "cpu")
    expected = logits(model, config, torch.float32, "cpu")
    gemm = CountingGemm()
    for name, layer in model.named_modules():
        if isinstance(layer, Linear) and "layers." in name and not name.endswith(without):
            layer.use_gemms(dict.fromkeys(BUCKETS, gemm))
    found = logits(model, config, torch.float32, "cpu")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    layers = len(model.layers)
    expected_adds = layers if without in ("qkv", "down") else layers - 1
    assert gemm.done.count("add") == expected_adds * STEPS
    assert sum(what.startswith("norm") for what in gemm.done) == expected_adds * STEPS


def test_more_rows_than_a_gemm_has_norms_of_have_a_kernel_for_them():
    norm = RMSNorm(16, 1e-6, torch.float32)
    layer, consumer = (Linear(16, 16, bias=False, dtype=torch.float32) for _ in range(2))
    for each in (layer, consumer):
        each.use_gemms(dict.fromkeys(BUCKETS, CountingGemm(most_normed=32)))
    layer.precedes(norm, consumer)
    for rows, in_gemm in ((32, True), (33, False)):
        assert consumer.takes_normed(rows) == in_gemm
        assert (layer.norm_in_gemm(torch.zeros(rows, 16)) is norm) == in_gemm


def test_a_norm_refuses_what_a_gemm_has_prepared_for_another():
    norm, other = (RMSNorm(16, 1e-6, torch.float32) for _ in range(2))
    residual = torch.zeros(2, 16)
    prepared = NormedRows.room_for(residual, 1, other)
    consumer = Linear(16, 16, bias=False, dtype=torch.float32)
    consumer.use_gemms({8: CountingGemm()})
    with pytest.raises(AssertionError, match="another norm"):
        norm.add(prepared, residual, consumer=consumer)


def counted(method: Callable[..., Tensor], done: list[str]) -> Callable[..., Tensor]:
    def call(gemm: SkinnyGemm, x: Any, *args: Any) -> Tensor:
        done.append("norm" if isinstance(x, NormedRows) else method.__name__)
        return method(gemm, x, *args)

    return call


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5-text"])
def test_logits_on_a_gpu_differ_by_roundings_alone(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, config = model_of(kind, tmp_path, torch.bfloat16, "cuda")
    gemm = SkinnyGemm(64, 128, 3, 7)
    for layer in layers_of(model):
        layer.use_gemms(dict.fromkeys(BUCKETS, gemm))
        layer.may_norm = False
    expected = logits(model, config, torch.bfloat16, "cuda")
    for layer in layers_of(model):
        layer.may_norm = True
    done: list[str] = []
    for what in ("add_to", "multiply"):
        monkeypatch.setattr(SkinnyGemm, what, counted(getattr(SkinnyGemm, what), done))
    found = logits(model, config, torch.bfloat16, "cuda")
    layers = len(model.layers)
    second = sum(bool(net and net.ba) for net in nets_of(model)[1:])
    assert done.count("add_to") == 3 * (2 * layers - 1)
    assert done.count("norm") == 3 * (2 * layers - 1 + second)
    assert (found - expected).norm() <= 0.02 * expected.norm()
