"""Layers whose GEMMs hand codes to each other: what they compute, and when they are chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_zoo.config import ModelConfig
from model_zoo.layers.gemm.implementations import BUCKETS
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.quantized_gemm.fp8_gemm import DequantizeThenCublas
from model_zoo.layers.quantized_gemm.tiled import autotune
from model_zoo.layers.quantized_gemm.tiled.autotune import best_of, choose
from model_zoo.layers.quantized_gemm.tiled.candidates import tiled_candidates
from model_zoo.layers.quantized_gemm.tiled.gemm import TiledFp8Gemm
from model_zoo.layers.quantized_gemm.tiled.timed_chains import Chains, Gemms
from model_zoo.layers.tiled_rows import TiledRows
from model_zoo.model import Model
from tests.support.kernels.quantized_cases import interpreted_tiled_gemm
from tests.support.models.paged_forward import PagedRow
from tests.support.quantization.w8a8_models import (
    config_of,
    product,
    use_scaled_mm,
    w8a8_linears,
    w8a8_model,
)

BF16 = torch.bfloat16
LENGTH, STEPS = 7, 3  # tokens, and of how many steps
TILED: Gemms = {
    "qkv": TiledFp8Gemm(64, 512, 2, 4, 1, 2),
    "out": TiledFp8Gemm(64, 256, 2, 4, 2, 2),
    "gate_up": TiledFp8Gemm(128, 256, 2, 3, 1, 2),
    "down": TiledFp8Gemm(64, 256, 2, 4, 1, 2),
}


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return config_of("qwen3", tmp_path)


@pytest.fixture
def model(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    """In fp8, of ScaledMM."""
    use_scaled_mm(monkeypatch, "cpu")
    found = w8a8_model(config, "row", BF16, torch.device("cpu"))
    for norm in found.modules():
        if isinstance(norm, RMSNorm):  # all ones would hide a norm by another one's weight
            norm.weight.copy_(torch.rand_like(norm.weight) + 0.5)
    for linear in w8a8_linears(found).values():
        linear.use_gemms({}, product("row", BF16, "cpu"))
    with interpreted_tiled_gemm():
        yield found


def logits(model: Model, config: ModelConfig) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(config.vocab_size, (LENGTH,))
    row = PagedRow(model, config, BF16, device="cpu")
    return row.feed_in_steps(tokens, [LENGTH - 3, LENGTH - 2]).double()


def assert_as_exact(model: Model, config: ModelConfig, found: Tensor, plain: Tensor) -> None:
    """That scales for 64 columns of x are no less exact than those of rows."""
    for linear in w8a8_linears(model).values():
        linear.use_gemms(dict.fromkeys(BUCKETS, DequantizeThenCublas()))
    exact = logits(model, config)
    assert 0 < (found - exact).norm() <= 1.2 * (plain - exact).norm()


def use_tiled(model: Model, places: set[str]) -> None:
    gemms = {place: gemm for place, gemm in TILED.items() if place in places}
    for chain in model.chains():
        for place, gemm in gemms.items():
            chain.linears[place].use_gemms(dict.fromkeys(BUCKETS, gemm))


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What TiledFp8Gemm has been called for, and whether it had to quantize x."""
    found: list[str] = []

    def recorded(name: str) -> Any:
        method = getattr(TiledFp8Gemm, name)

        def call(gemm: TiledFp8Gemm, *args: Any) -> Any:
            quantizes = name == "tiled" and isinstance(args[0], Tensor)
            found.extend(["quantize"] if quantizes else [name] if name != "tiled" else [])
            return method(gemm, *args)

        return call

    for name in ("tiled", "multiply", "gated", "add_to"):
        monkeypatch.setattr(TiledFp8Gemm, name, recorded(name))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_rows_stay_codes_from_one_gemm_to_the_next_but_for_attention(
    model: Model, config: ModelConfig, done: list[str]
):
    plain = logits(model, config)
    use_tiled(model, {*TILED})
    found = logits(model, config)
    assert_as_exact(model, config, found, plain)
    layers = len(model.layers)
    assert done.count("add_to") == (2 * layers - 1) * STEPS  # no norm with a consumer at the end
    assert done.count("gated") == layers * STEPS
    assert done.count("quantize") == (1 + layers) * STEPS  # embeddings, and attention's outputs


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
@pytest.mark.parametrize("without", [*TILED])
def test_a_gemm_stores_codes_only_where_the_next_one_takes_them(
    model: Model, config: ModelConfig, done: list[str], without: str
):
    plain = logits(model, config)
    use_tiled(model, {*TILED} - {without})
    found = logits(model, config)
    assert_as_exact(model, config, found, plain)
    layers = len(model.layers)
    sums = {"qkv": layers, "out": layers - 1, "gate_up": layers - 1, "down": layers}[without]
    assert done.count("add_to") == sums * STEPS
    assert done.count("gated") == (0 if without in ("gate_up", "down") else layers * STEPS)


def test_a_norm_refuses_codes_that_a_gemm_has_prepared_for_another(model: Model):
    use_tiled(model, {*TILED})
    chain, residual = model.chains()[0], torch.zeros(2, 512, dtype=BF16)
    order = TILED["qkv"].order
    prepared = TiledRows.room_for((2, 512), order, BF16, residual.device, chain.mlp_norm)
    with pytest.raises(AssertionError, match="another norm"):
        chain.attention_norm.add(prepared, residual, consumer=chain.qkv)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")
def test_gemms_that_hand_on_something_else_are_found_out(
    model: Model, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    layers = Chains(model.chains(), 8)
    assert layers.error(TILED) <= autotune.LARGEST_ERROR / 2
    add_to = TiledFp8Gemm.add_to

    def without_squares(*args: Any) -> TiledRows:
        return replace(add_to(*args), squares=None)

    monkeypatch.setattr(TiledFp8Gemm, "add_to", without_squares)
    assert not autotune._checked(layers, TILED)
    assert "are not used with 8 rows" in caplog.text


class Timed(Chains):
    """With times of a test, by the place that has another GEMM."""

    def __init__(self, model: Model, plain: float, first: float, others: dict[str, float]) -> None:
        super().__init__(model.chains(), 8)
        self._plain, self._first, self._others = plain, first, others

    def candidates(self) -> list[Gemms]:
        second = TiledFp8Gemm(64, 256, 3, 4, 1, 2)
        return [TILED, *({**TILED, place: second} for place in self._others)]

    def microseconds(self, choices: Any) -> list[float]:
        return [self._plain, self._first, *self._others.values()]


def test_the_best_gemm_of_each_place_is_chosen_if_together_they_are_faster(model: Model):
    before = Chains(model.chains(), 8).gemms()
    assert choose(Timed(model, 60.0, 59.0, {})) == before, "less than 2 % is not worth it"
    assert choose(Timed(model, 60.0, 50.0, {})) == TILED
    found = choose(Timed(model, 60.0, 61.0, {"out": 58.0, "down": 60.0, "qkv": 62.0}))
    assert {place for place, gemm in found.items() if gemm != TILED[place]} == {"out", "down"}
    assert best_of([TILED], [50.0]) == (TILED, 50.0)


@pytest.mark.parametrize("rows", BUCKETS[:-1])
@pytest.mark.parametrize("processors", [114, 132])
@pytest.mark.parametrize("hidden, inner", [(4096, 12_288), (5120, 17_408), (2048, 6144)])
def test_each_place_has_a_gemm_of_whole_tiles(hidden: int, inner: int, processors: int, rows: int):
    for output, outputs, inputs in (
        ("plain", 3 * hidden // 2, hidden),
        ("added", hidden, inner),
        ("gated", 2 * inner, hidden),
    ):
        gemms = tiled_candidates(processors, rows, outputs, inputs, output)
        assert gemms and all(gemm.serves(rows, outputs, inputs) for gemm in gemms)
        assert all(gemm.programs <= processors for gemm in gemms)
        assert gemms[0].split_units * gemms[0].block_k == inputs
        assert all(gemm.gates for gemm in gemms) == (output == "gated")
        assert all(gemm.adds for gemm in gemms) == (output == "added") or output == "plain"
