"""How one of several kernels of nearly the same time is chosen by the time of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from model_zoo.layers.gemm import autotune, autotune_cache
from model_zoo.layers.gemm.autotune import autotune_gemms
from model_zoo.layers.gemm.autotune_cache import read_choices
from model_zoo.layers.gemm.implementations import CublasGemm, GemmImpl, SkinnyGemm, SplitK
from model_zoo.layers.gemm.in_step import CloseCandidates, choose_in_step, nearly_fastest
from model_zoo.layers.linear import Linear
from model_zoo.layers.quantized_gemm.packed_weight import pack
from model_zoo.layers.quantized_gemm.skinny import SkinnyQuantizedGemm
from model_zoo.layers.swiglu_linear import SwigluLinear
from tests.support.kernels.quantized_cases import quantized

GEMMS: list[GemmImpl] = [SkinnyGemm(64, 128, 4, 132), CublasGemm(), SplitK(32, 128, 2)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def named_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune_cache, "environment_key", lambda device: "a GPU")


class Steps:
    """Steps that take as long as `took` says of what is in use."""

    def __init__(self, took: Callable[[GemmImpl], float]) -> None:
        self._took = took
        self.rows: list[int] = []
        self.checked: list[int] = []
        self.right = True
        self.compared: list[GemmImpl] = []
        self.in_use: dict[int, GemmImpl] = {}  # by rows

    def close(self, rows: int, options: Sequence[GemmImpl] = GEMMS) -> CloseCandidates:
        def use(option: GemmImpl) -> None:
            self.in_use[rows] = option

        def check() -> bool:
            self.checked.append(rows)
            return self.right

        use(options[0])
        return CloseCandidates(f"{rows} rows", rows, [], options, use, check)

    def times(self, rows: int, choices: Sequence[Callable[[], None]]) -> list[float]:
        self.rows.append(rows)
        found: list[float] = []
        for choose in choices:
            choose()
            self.compared.append(self.in_use[rows])
            found.append(self._took(self.in_use[rows]))
        return found


@pytest.mark.parametrize(
    ("took", "best"),
    [
        ({0: 100.0, 1: 98.9, 2: 98.5}, 2),
        ({0: 100.0, 1: 98.9, 2: 99.5}, 1),
        ({0: 100.0, 1: 99.8, 2: 99.2}, 0),  # less than two measurements differ by
        ({0: 100.0, 1: 101.0, 2: 102.0}, 0),
        ({0: 1000.0, 1: 998.0, 2: 997.5}, 0),  # 2.5 us, and a fourth of a per cent
        ({0: 1000.0, 1: 998.0, 2: 996.5}, 2),
    ],
)
def test_what_the_step_is_shortest_with_is_used_and_kept_if_it_is_clearly_shorter(
    took: dict[int, float], best: int, tmp_path: Path
):
    steps = Steps(lambda gemm: took[GEMMS.index(gemm)])
    choose_in_step([steps.close(8)], steps.times, CPU, file=tmp_path / "products.json")
    assert steps.compared == GEMMS and steps.in_use == {8: GEMMS[best]}
    kept = read_choices(tmp_path / "products.json", "a GPU")
    assert kept == ({"8 rows": GEMMS[best]} if best else {})
    assert steps.checked == ([8] if best else [])


def test_what_computes_something_else_in_a_step_is_not_used(tmp_path: Path):
    steps = Steps(lambda gemm: 100.0 - 2 * GEMMS.index(gemm))
    steps.right = False
    choose_in_step([steps.close(8)], steps.times, CPU, file=tmp_path / "products.json")
    assert steps.checked == [8] and steps.in_use == {8: GEMMS[0]}
    assert not (tmp_path / "products.json").exists()


def test_what_cannot_run_in_a_step_is_not_used(tmp_path: Path):
    took = dict(zip(GEMMS, [100.0, float("inf"), 90.0], strict=True))
    steps = Steps(lambda gemm: took[gemm])
    choose_in_step([steps.close(8)], steps.times, CPU, file=tmp_path / "products.json")
    assert steps.in_use == {8: GEMMS[2]}


def test_steps_of_the_fewest_rows_come_first(tmp_path: Path):
    steps = Steps(lambda gemm: 1.0)
    close = [steps.close(rows) for rows in (8, 64, 1, 16)]
    choose_in_step(close, steps.times, CPU, file=tmp_path / "products.json")
    assert steps.rows == [1, 8, 16, 64]


def test_what_comes_too_late_stays_as_it_is(tmp_path: Path):
    steps = Steps(lambda gemm: 0.0)
    close = steps.close(8)
    choose_in_step([close], steps.times, CPU, seconds=-1.0, file=tmp_path / "products.json")
    assert not steps.compared and steps.in_use == {8: GEMMS[0]}


def test_where_no_step_can_be_timed_the_first_one_is_used_again(tmp_path: Path):
    steps = Steps(lambda gemm: 0.0)

    def none(rows: int, choices: Sequence[Callable[[], None]]) -> list[float]:
        steps.times(rows, choices)
        return []

    close = [steps.close(8), steps.close(16)]
    choose_in_step(close, none, CPU, file=tmp_path / "products.json")
    assert steps.in_use == {8: GEMMS[0], 16: GEMMS[0]}
    assert steps.rows == [8, 16], "of other layers there may be some"
    assert not (tmp_path / "products.json").exists()


@pytest.mark.parametrize(
    ("took", "order"),
    [
        ([10.0, 7.5, 8.0], [1, 2]),  # 6.7 % slower
        ([8.05, 8.0, 7.9], [0, 2, 1]),  # the fastest is not clearly faster
        ([10.0, 7.0, 8.0], [1]),
        ([10.0, 11.0, 12.0], [0]),
        ([10.0, 9.0, 8.9, 9.1, 8.8, float("inf")], [4, 2, 1]),
        ([float("inf")] * 3, [0]),
    ],
)
def test_close_is_what_takes_nearly_as_long_as_the_chosen_one_the_fastest_first(
    took: list[float], order: list[int]
):
    assert nearly_fastest(took, 0.98) == order


def tuned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    layers: Sequence[Linear],
    gemms: list[GemmImpl],
    small_bytes: int = 0,
) -> list[CloseCandidates]:
    """Of layers on a CPU for which all GEMMs take equally long, of 1 and 8 rows."""
    for name, fake in {
        "supports_kernels": lambda device, dtype: True,
        "candidates_for": lambda key, device: gemms,
        "runnable": lambda found, rows, layer: found,
        "check_fused": lambda name, rows, found: None,
        "fused_is_right": lambda rows, found: (rows, [*found]),
        "BUCKETS": (1, 8),
        "SIZES": (1024,),
    }.items():
        monkeypatch.setattr(autotune, name, fake)
    timing = pytest.importorskip("model_zoo.layers.gemm.timing", reason="Triton is not here")
    monkeypatch.setattr(timing, "times", lambda *timed: [5.0] * len(gemms))
    monkeypatch.setattr(timing, "SMALL_BYTES", small_bytes)
    return autotune_gemms(nn.ModuleList(layers), file=tmp_path / "products.json")


def test_layers_have_close_candidates_for_each_small_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    layers = [Linear(8, 16, bias=False, dtype=torch.float32) for _ in range(3)]
    gated = SwigluLinear(8, 16, bias=False, dtype=torch.float32)  # tuned for many rows, too
    found = tuned(monkeypatch, tmp_path, [*layers, gated], GEMMS)
    assert sorted((len(close.layers), close.rows) for close in found) == [
        (1, 1), (1, 8), (3, 1), (3, 8),
    ]  # fmt: skip
    [one, eight] = (close for close in found if len(close.layers) == 3)
    assert one.candidates == eight.candidates == GEMMS and eight.layers == layers
    eight.use(GEMMS[2])
    for layer in layers:
        assert layer.gemm_of(8) == GEMMS[2] and layer.gemm_of(1) == GEMMS[0]
    assert gated.gemm_of(8) == GEMMS[0]
    assert eight.check is not None and eight.check() == (8, layers)
    assert set(read_choices(tmp_path / "products.json", "a GPU")) >= {one.name, eight.name}
    again = autotune_gemms(nn.ModuleList(layers), file=tmp_path / "products.json")
    assert not again, "their choices are kept"


def test_configurations_that_differ_only_in_a_step_are_compared_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    weight = pack(quantized("int4 g128", 64, 1024))
    monkeypatch.setattr(Linear, "operand", property(lambda layer: weight))
    gemm = SkinnyQuantizedGemm(32, 1024, 4, 264, 1, 2, 128, sync=True, apart=True)
    other = SkinnyQuantizedGemm(64, 512, 3, 396, 1, 2, 80, sync=True, apart=True)
    layers = [Linear(8, 16, bias=False, dtype=torch.float32) for _ in range(2)]
    close, _ = tuned(monkeypatch, tmp_path, layers, [gemm, other, CublasGemm()])
    [less], [less_of_other] = gemm.for_steps(weight), other.for_steps(weight)
    assert close.candidates == [gemm, less, other, less_of_other, CublasGemm()]


def test_weights_that_are_read_in_no_time_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """As those of routers, which of few rows have another kernel."""
    layers = [Linear(8, outputs, bias=False, dtype=torch.float32) for outputs in (16, 16, 17, 17)]
    found = tuned(monkeypatch, tmp_path, layers, GEMMS, small_bytes=16 * 8 * 4)
    assert {layer.weight.shape[0] for close in found for layer in close.layers} == {17}


def test_layers_with_one_candidate_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    layers = [Linear(8, 16, bias=False, dtype=torch.float32) for _ in range(2)]
    assert not tuned(monkeypatch, tmp_path, layers, GEMMS[:1])
