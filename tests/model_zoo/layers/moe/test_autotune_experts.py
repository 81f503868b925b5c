"""How experts choose the tiles of their kernels: timed, chosen, kept in a file, used by tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from model_zoo.layers.gemm import autotune_cache
from model_zoo.layers.gemm.autotune_cache import read_choices, sources, write_choices
from model_zoo.layers.gemm.implementations import CublasGemm
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe import autotune as choosing
from model_zoo.layers.moe import timing
from model_zoo.layers.moe.autotune import autotune_experts, choose, layers_by_key, use
from model_zoo.layers.moe.experts import ExpertNames, Experts
from model_zoo.layers.moe.hopper.tiles import HopperTiles
from model_zoo.layers.moe.router.router import Router
from model_zoo.layers.moe.run import run_experts
from model_zoo.layers.moe.tiles import BUCKETS, FEW, ExpertTiles, candidates
from model_zoo.layers.moe.timing import is_right, random_routing
from model_zoo.moe_config import MoEConfig, RouterConfig, Scoring
from tests.support.kernels.expert_cases import exactly, make_experts, routing
from tests.support.kernels.uninterpreted import run_uninterpreted

TRIED = [ExpertTiles(*[16] * 9), HopperTiles(8, 1, 396, 3, sync=True)]


def some_experts(device: str = "cpu", **fields: object) -> Experts:
    sizes: dict[str, object] = {"num_experts": 8, "top_k": 2, "hidden": 64, "inner": 32}
    return make_experts(**{**sizes, **fields}, dtype=torch.bfloat16, device=device)  # type: ignore[arg-type]


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "supports_kernels", lambda device, dtype: True)


@pytest.mark.usefixtures("with_kernels")
def test_experts_of_one_shape_are_tuned_together_and_by_tokens():
    same, other = nn.ModuleList([some_experts(), some_experts()]), some_experts(inner=48)
    layers = layers_by_key(nn.ModuleList([same, other]))
    assert sorted(len(found) for found in layers.values()) == [1] * len(BUCKETS) + [2] * len(
        BUCKETS
    )
    assert len({str(key) for key in layers}) == len(layers), "names in the file"
    packed = layers_by_key(some_experts(hidden=128, inner=128, weights="int4 g32 zeros"))
    assert "int4 in groups of 32, zero points" in str(next(iter(packed)))


@pytest.mark.usefixtures("with_kernels")
def test_batch_invariant_experts_are_not_tuned():
    experts = some_experts()
    experts.use_tiles({}, batch_invariant=True)
    assert not layers_by_key(experts)


@pytest.mark.usefixtures("with_kernels")
def test_the_first_tiles_stay_unless_others_are_clearly_faster():
    experts = some_experts()

    def times(
        layers: Sequence[Experts], tiles: Sequence[ExpertTiles], tokens: int
    ) -> Sequence[float]:
        better = 9.0 if tokens == 4 else 9.9
        return [10.0] * (len(tiles) - 1) + [better]

    found = choose(layers_by_key(experts), times, 60.0)
    made = {key: tiles[0] for key, tiles in found.items()}
    by_tokens = {key.tokens: tiles for key, tiles in made.items()}
    assert by_tokens[1] == candidates(1, experts)[0]
    assert by_tokens[4] == candidates(4, experts)[-1]
    use(layers_by_key(experts), made)
    assert experts.tiles_of(3) == experts.tiles_of(4) == by_tokens[4]
    assert experts.tiles_of(2) == by_tokens[4] and experts.tiles_of(5) == by_tokens[FEW]
    assert experts.tiles_of(5000) == candidates(5000, experts)[0]


@pytest.mark.usefixtures("with_kernels")
def test_tiles_of_some_numbers_of_tokens_are_replaced_in_a_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Those of up to 64 tokens, of which some take as long as the first ones."""
    monkeypatch.setattr(timing, "times", lambda layers, tiles, tokens: [5.0] * len(tiles))
    monkeypatch.setattr(choosing, "candidates", lambda tokens, experts: TRIED)
    monkeypatch.setattr(autotune_cache, "environment_key", lambda device: "gpu, here")
    sizes = {"hidden": 1024, "inner": 512, "weights": "mxfp4"}
    layers = [some_experts(**sizes), some_experts(**sizes)]
    close = autotune_experts(nn.ModuleList(layers), file=tmp_path / "products.json")
    assert all(of_tokens.layers == layers for of_tokens in close)
    assert [of_tokens.rows for of_tokens in close] == [1, 4, 8, 16, 32, 64]
    first = layers[0]
    assert isinstance(TRIED[1], HopperTiles)
    less = TRIED[1].for_steps(first.gate_up, first.down)
    assert close[2].candidates == [TRIED[0], TRIED[1], *less] and len(less) == 1
    close[2].use(TRIED[1])
    for experts in layers:
        assert experts.tiles_of(8) == TRIED[1]
        assert experts.tiles_of(4) == experts.tiles_of(16) == TRIED[0]
    written = read_choices(tmp_path / "products.json", "gpu, here")
    assert written[close[2].name] == TRIED[0], "until a step has been timed"


@pytest.mark.usefixtures("with_kernels")
def test_what_is_reached_too_late_keeps_the_first_tiles_and_is_logged(
    caplog: pytest.LogCaptureFixture,
):
    experts = some_experts()
    with caplog.at_level(logging.WARNING):
        assert choose(layers_by_key(experts), lambda *_: [1.0], -1.0) == {}
    assert "11 of 11 tiles of experts are not timed" in caplog.text
    assert experts.tiles_of(1) == candidates(1, experts)[0]


def test_tiles_are_kept_in_the_file_of_the_gemms(tmp_path: Path):
    file, tiles = tmp_path / "products.json", candidates(64, some_experts())[0]
    write_choices(file, "gpu, here", {"a layer": CublasGemm(), "some experts": tiles})
    assert read_choices(file, "gpu, here") == {"a layer": CublasGemm(), "some experts": tiles}
    assert any(path.name == "grouped.py" for path in sources())


def test_tiles_whose_output_is_not_that_of_the_first_are_not_used(
    caplog: pytest.LogCaptureFixture,
):
    tiles = candidates(1, some_experts())[0]
    expected = torch.randn(3, 64)
    assert is_right(expected * 1.01, expected, tiles) and not caplog.records
    for wrong in (expected * 1.1, expected.flip(0), expected * float("nan")):
        caplog.clear()
        assert not is_right(wrong, expected, tiles)
        assert "is not used: its output differs" in caplog.text


def test_the_routing_of_a_timing_has_an_expert_that_is_here():
    experts = some_experts()
    experts.num_experts, experts.all_experts = 1, 64  # of which two are chosen
    for seed in range(8):
        torch.manual_seed(seed)
        ids, weights = random_routing(experts, 1, torch.device("cpu"))
        assert sorted(ids[0].tolist()) == [0, 1] and weights.shape == ids.shape


def test_tiles_of_hopper_are_kept_in_the_file(tmp_path: Path):
    file, tiles = tmp_path / "products.json", HopperTiles(16, 1, 264, 2, sync=True)
    write_choices(file, "gpu, here", {"some experts": tiles})
    assert read_choices(file, "gpu, here") == {"some experts": tiles}
    assert {"kernel.py", "multiply.py"} <= {path.name for path in sources()}


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "fp8 block", "mxfp4", "int4 g128"])
def test_tuned_experts_are_right(weights: str | None, tmp_path: Path):
    layers = nn.ModuleList(
        [
            some_experts("cuda", num_experts=16, hidden=512, inner=256, weights=weights)
            for _ in range(2)
        ]
    )
    autotune_experts(layers, seconds=60.0, file=tmp_path / "chosen.json")
    experts = layers[1]
    assert isinstance(experts, Experts)
    for tokens in (1, 3, 8, 9, 33, 200):
        ids, scores = routing("balanced", tokens, experts)
        x = torch.randn(tokens, 512, device="cuda") / 512**0.5 / experts.gate_up.exact.std()
        x = x.bfloat16()
        y = run_experts(experts, x, ids, scores)
        exact = exactly(experts, x, ids, scores)
        assert (y.double().cpu() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_candidates_add_what_a_shared_expert_has_computed(
    scoring: Scoring, monkeypatch: pytest.MonkeyPatch
):
    """With a gate of the type that the layer's router has: other kernels would be compiled."""
    router = RouterConfig(num_experts=8, top_k=2, scoring=scoring)
    config = MoEConfig(router=router, intermediate_size=32, shared_size=48, shared_gate=True)
    linears = LinearFactory(torch.bfloat16)
    experts = Experts(config, 64, ExpertNames("experts"), linears)
    given: list[Tensor] = []

    def run(
        experts: Experts, x: Tensor, ids: Tensor, weights: Tensor, shared: Tensor, gate: Tensor,
        tiles: object,
    ) -> Tensor:  # fmt: skip
        given.extend((shared, gate))
        return x

    monkeypatch.setattr(timing, "run_experts", run)
    timing.ExpertsTimer([experts], 3).run(0, candidates(3, experts)[0])
    shared, gate = given
    assert shared.shape == (3, 64) and shared.dtype == torch.bfloat16 and shared.any()
    assert gate.shape == (3,) and gate.any()
    assert gate.dtype == Router(router, 64, linears, shared_gate=True).linear.dtype


def test_kernels_that_add_a_shared_expert_take_its_gate_wherever_it_lies():
    """In the router's output it lies elsewhere, and at another stride, than in a trial.

    In a process of its own, since interpreted kernels have no parameters.
    """
    program = (
        "from model_zoo.layers.moe.few_tokens import _few_down\n"
        "from model_zoo.layers.moe.grouped import _grouped_down\n"
        "from model_zoo.layers.moe.hopper.kernel import _experts_product\n"
        "from model_zoo.layers.moe.sum_pairs import _sum_pairs\n"
        "for kernel in (_few_down, _grouped_down, _experts_product, _sum_pairs):\n"
        "    params = {param.name: param for param in kernel.params}\n"
        "    stride = params.get('gate_stride')\n"
        "    assert stride is None or stride.do_not_specialize, kernel\n"
        "    assert params['SHARED_GATE'].do_not_specialize_on_alignment, kernel\n"
    )
    run_uninterpreted(program)


@pytest.mark.gpu
def test_a_graph_replays_other_routings_than_it_was_captured_with():
    experts = some_experts("cuda", num_experts=16, hidden=512, inner=256)
    for tokens in (3, 8, 30, 300):
        x = torch.randn(tokens, 512, device="cuda").bfloat16()
        ids, scores = routing("balanced", tokens, experts)
        run_experts(experts, x, ids, scores)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run_experts(experts, x, ids, scores)
        for kind in ("few experts", "one expert", "balanced"):
            others, weights = routing(kind, tokens, experts)
            ids.copy_(others)
            scores.copy_(weights)
            graph.replay()
            exact = exactly(experts, x, others, weights)
            assert (y.double().cpu() - exact).norm() <= 0.01 * exact.norm()
