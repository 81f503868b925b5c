"""The experts' kernels against float64, for few tokens and for many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.moe import tiles as tiles_of_gpus
from model_zoo.layers.moe.expert_tile import weight_arguments
from model_zoo.layers.moe.experts import Experts
from model_zoo.layers.moe.run import run_experts
from model_zoo.layers.moe.tiles import BUCKETS, ExpertTiles, ProductTile, candidates
from model_zoo.moe_config import Activation
from tests.support.interpreter.ordered_dot import ordered_dot  # noqa: F401
from tests.support.kernels.expert_cases import ROUTINGS, exactly, make_experts, routing
from tests.support.kernels.quantized_cases import KINDS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL = ExpertTiles.of(16, ProductTile(16, 64), ProductTile(32, 64))
UNEVEN = ExpertTiles.of(16, ProductTile(32, 128), ProductTile(16, 128))
CORNERS = {"int4 g32 zeros", "nvfp4", "mxfp4", "fp8 block", "fp8 row"}
# int4 with bfloat16 scales, and all other kinds that decode_bf16.py reads.
BF16_KINDS = ("int4 g128", "int4 g32 zeros", "int4 row", "nvfp4", "mxfp4", "fp8 row", "fp8 block")
EACH_KIND = [
    name if name in CORNERS else pytest.param(name, marks=pytest.mark.slow) for name in KINDS
]


def few_experts(device: str, dtype: torch.dtype = FP16, **fields: object) -> Experts:
    sizes: dict[str, object] = {"num_experts": 6, "top_k": 3, "hidden": 96, "inner": 40}
    return make_experts(**{**sizes, **fields}, dtype=dtype, device=device)  # type: ignore[arg-type]


def check(
    experts: Experts,
    tokens: int,
    kind: str = "balanced",
    tiles: ExpertTiles | None = None,
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """That the error is that of inner values and outputs rounded to x's type."""
    ids, weights = routing(kind, tokens, experts)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, experts.hidden, generator=generator)
    x /= experts.gate_up.exact.std() * experts.hidden**0.5  # inner values of about 1
    x = x.to(experts.gate_up.dtype).to(ids.device)
    y = run_experts(experts, x, ids, weights, shared, gate, tiles)
    exact = exactly(experts, x, ids, weights)
    if shared is not None:
        factor = 1.0 if gate is None else gate.double().cpu().sigmoid()[:, None]
        exact += shared.double().cpu() * factor
    assert y.shape == x.shape and y.dtype == x.dtype
    unit = torch.finfo(x.dtype).eps if x.dtype != FP32 else 2e-6
    error = (y.double().cpu() - exact).norm() / exact.norm()
    assert error <= 1.5 * unit, (float(error), unit)
    assert int(workspace(x.device)[1].sum()) == 0
    return y


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_few_tokens_need_no_sorting(device: str, tokens: int, kind: str):
    check(few_experts(device), tokens, kind, SMALL)


@pytest.mark.parametrize("tokens", [9, 17, 50])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_groups_of_tokens_of_any_size_are_multiplied(device: str, tokens: int, kind: str):
    check(few_experts(device), tokens, kind, SMALL)


@pytest.mark.parametrize("tokens", [3, 30])
@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul", "clamped_swiglu"])
def test_every_activation_and_biases_are_applied(device: str, tokens: int, activation: Activation):
    check(few_experts(device, activation=activation, bias=True), tokens, tiles=UNEVEN)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about NaN
@pytest.mark.parametrize("tokens", [3, 12])
@pytest.mark.parametrize("half", ["gates", "ups"])
@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul", "clamped_swiglu"])
def test_nan_of_a_broken_checkpoint_reaches_the_outputs(
    device: str, activation: Activation, half: str, tokens: int
):
    experts = few_experts(device, activation=activation)
    weight = experts.gate_up.weight  # [experts, gates before ups, hidden]
    assert weight is not None
    weight[:, 0 if half == "gates" else experts.inner] = float("nan")
    ids, weights = routing("balanced", tokens, experts)
    x = torch.ones(tokens, experts.hidden, dtype=FP16, device=device)
    assert run_experts(experts, x, ids, weights, tiles=SMALL).isnan().all()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tokens", [3, 12])
def test_nan_of_the_shared_experts_gate_reaches_the_outputs(device: str, tokens: int):
    experts = few_experts(device)
    ids, weights = routing("balanced", tokens, experts)
    x = torch.ones(tokens, experts.hidden, dtype=FP16, device=device)
    gate = torch.full((tokens,), float("nan"), dtype=FP16, device=device)
    assert run_experts(experts, x, ids, weights, x, gate, SMALL).isnan().all()


@pytest.mark.parametrize("tokens", [4, 20])
@pytest.mark.parametrize("gated", [True, False])
def test_the_shared_expert_is_added_with_its_gate(device: str, tokens: int, gated: bool):
    experts = few_experts(device)
    shared = torch.randn(tokens, experts.hidden, device=device).to(FP16)
    wide = torch.randn(tokens, 7, device=device).to(FP16)
    check(experts, tokens, tiles=SMALL, shared=shared, gate=wide[:, 6] if gated else None)


@pytest.mark.parametrize(
    ("tokens", "with_shared"), [(1, True), (7, False), (30, True), (30, False)]
)
def test_experts_of_other_ranks_are_left_out_of_the_sum(
    device: str, tokens: int, with_shared: bool
):
    """Some tokens have none of the experts that are here."""
    experts = few_experts(device, own=(1, 3), top_k=2)
    shared = torch.randn(tokens, experts.hidden, device=device).to(FP16) if with_shared else None
    ids, _ = routing("balanced", tokens, experts)
    assert tokens == 1 or (ids == 2).all(1).any()
    check(experts, tokens, tiles=SMALL, shared=shared)


def test_a_rank_without_any_of_the_chosen_experts_adds_the_shared_one_alone(device: str):
    experts = few_experts(device, own=(0, 2))
    for tokens in (2, 12):
        shared = torch.randn(tokens, experts.hidden, device=device).to(FP16)
        ids = torch.full((tokens, 3), 2, dtype=torch.int32, device=device)
        weights = torch.ones(tokens, 3, device=device)
        y = run_experts(experts, shared, ids, weights, shared, None, SMALL)
        assert torch.equal(y, shared)


@pytest.mark.parametrize("tokens", [3, 20])
def test_some_of_the_quantized_experts_are_dequantized_on_the_way(device: str, tokens: int):
    sizes = {"hidden": 256, "inner": 128, "num_experts": 4, "top_k": 2}
    experts = few_experts(device, **sizes, own=(2, 4), weights="fp8 block")
    assert experts.is_packed and experts.num_experts == 2
    check(experts, tokens, tiles=UNEVEN)


@pytest.mark.parametrize("tokens", [2, 19])
def test_float32_is_multiplied_exactly(device: str, tokens: int):
    check(few_experts(device, FP32), tokens)


@pytest.mark.slow
def test_hundreds_of_tokens_fill_several_tiles_of_an_expert(device: str):
    experts = few_experts(device, num_experts=3, top_k=2)
    tiles = ExpertTiles.of(64, ProductTile(64, 64), ProductTile(64, 64))
    for kind in ROUTINGS:
        check(experts, 512, kind, tiles)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("name", EACH_KIND)
def test_quantized_experts_of_every_kind_are_dequantized_on_the_way(
    device: str, tokens: int, name: str
):
    experts = few_experts(device, hidden=256, inner=128, num_experts=3, top_k=2, weights=name)
    assert experts.is_packed
    check(experts, tokens, tiles=UNEVEN)


@pytest.mark.parametrize("tokens", [3, 20])
@pytest.mark.parametrize("name", BF16_KINDS)
def test_bfloat16_weights_are_dequantized_two_at_a_time(device: str, tokens: int, name: str):
    """By other instructions than float16 ones: the test above has those."""
    experts = few_experts(device, BF16, hidden=256, inner=128, num_experts=3, top_k=2, weights=name)
    modes = {weight_arguments(s).options["MODE"] for s in (experts.gate_up, experts.down)}
    assert modes == {"bfloat16"}
    check(experts, tokens, tiles=UNEVEN)


def test_columns_of_packed_experts_need_not_fill_a_block(device: str):
    """As those of gpt-oss: 2880 columns are 22.5 blocks of 128."""
    experts = few_experts(
        device, hidden=160, inner=96, num_experts=3, top_k=2, weights="mxfp4", bias=True,
        activation="clamped_swiglu",
    )  # fmt: skip
    for tokens in (2, 20):
        check(experts, tokens, tiles=UNEVEN)


def test_no_tokens_are_no_error(device: str):
    experts = few_experts(device)
    x = torch.empty(0, 96, dtype=FP16, device=device)
    ids = torch.empty(0, 3, dtype=torch.int32, device=device)
    assert run_experts(experts, x, ids, ids.float()).shape == (0, 96)


@pytest.mark.usefixtures("ordered_dot")
def test_a_token_has_the_same_bits_alone_and_among_others(device: str):
    experts = few_experts(device)
    experts.use_tiles({}, batch_invariant=True)
    ids, weights = routing("few experts", 40, experts)
    x = torch.randn(40, experts.hidden, device=device).to(FP16)
    whole = run_experts(experts, x, ids, weights)
    for rows in (1, 7, 20):
        some = run_experts(experts, x[:rows], ids[:rows], weights[:rows])
        assert torch.equal(some, whole[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "fp8 block", "fp8 row", "mxfp4", "int4 g128"])
def test_large_experts_are_batch_invariant(weights: str | None):
    experts = make_experts(
        num_experts=16, top_k=4, hidden=1024, inner=512, dtype=BF16, device="cuda", weights=weights
    )
    experts.use_tiles({}, batch_invariant=True)
    ids, scores = routing("few experts", 700, experts)
    x = torch.randn(700, 1024, device="cuda").to(BF16) / 32
    whole = run_experts(experts, x, ids, scores)
    for rows in (1, 2, 8, 9, 33, 64, 65, 300):
        some = run_experts(experts, x[:rows], ids[:rows], scores[:rows])
        assert torch.equal(some, whole[:rows]), rows
        assert torch.equal(run_experts(experts, x, ids, scores), whole), "the same at every run"


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, *KINDS])
def test_every_candidate_is_right(weights: str | None):
    experts = make_experts(
        num_experts=16, top_k=4, hidden=512, inner=256, dtype=BF16, device="cuda", weights=weights
    )
    for tokens in (1, 4, 8, 16, 40, 200, 1000):
        for tiles in candidates(tokens, experts):
            for kind in ROUTINGS:
                check(experts, tokens, kind, tiles)


def test_experts_that_were_not_chosen_are_not_read(device: str):
    """Their weights are not numbers here, which any product would show."""
    experts = few_experts(device)
    for tokens in (4, 20):
        ids, weights = routing("few experts", tokens, experts)
        others = sorted(set(range(6)) - set(ids.flatten().tolist()))
        assert others
        for stack in (experts.gate_up, experts.down):
            stack.weight[others] = float("nan")
        x = torch.randn(tokens, experts.hidden, device=device).to(FP16)
        assert run_experts(experts, x, ids, weights, tiles=SMALL).isfinite().all()


@pytest.mark.parametrize("hopper", [True, False])
@pytest.mark.parametrize("is_packed", [True, False])
def test_candidates_have_steps_that_the_formats_allow(
    is_packed: bool, hopper: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tiles_of_gpus, "is_hopper", lambda device: hopper)

    class Shape:
        all_experts, top_k, is_batch_invariant, is_float32 = 128, 8, False, False
        device = torch.device("cpu")

    Shape.is_packed = is_packed  # type: ignore[attr-defined]
    for tokens in BUCKETS:
        found = candidates(tokens, Shape())  # type: ignore[arg-type]
        assert found and len(set(found)) == len(found)
        for tiles in found:
            for tile in (tiles.gate_up, tiles.down):
                assert tile.columns % (128 if is_packed else 64) == 0
