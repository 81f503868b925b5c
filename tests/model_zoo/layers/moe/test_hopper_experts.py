"""The Hopper kernels of experts against float64: interpreted on the CPU, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from model_zoo.layers.gemm.implementations import workspace
from model_zoo.layers.moe.experts import Experts
from model_zoo.layers.moe.hopper.tiles import HopperTiles, hopper_candidates
from model_zoo.layers.moe.run import run_experts
from model_zoo.layers.moe.tiles import BUCKETS
from model_zoo.moe_config import Activation
from runtime.precompile.compiling import compiling_only
from runtime.precompile.pool import Compilers
from tests.support.interpreter.gluon_interpreter import interpreted
from tests.support.kernels.expert_cases import ROUTINGS, exactly, make_experts, routing
from tests.support.kernels.quantized_cases import KINDS
from tests.support.kernels.shipped_experts import experts_of

BF16, FP16 = torch.bfloat16, torch.float16
CORNERS = {"int4 g32 zeros", "nvfp4", "mxfp4", "fp8 block", "fp8 row"}
SERVED = [
    name if name in CORNERS else pytest.param(name, marks=pytest.mark.slow)
    for name in KINDS
    if name != "int4 row zeros"
]
SMALL = HopperTiles(8, 1, 3, 2)
TWO_WARPGROUPS = HopperTiles(8, 2, 2, 1)
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the kernels themselves")


@pytest.fixture
def on_interpreter() -> Iterator[None]:
    packed, experts = "model_zoo.layers.quantized_gemm.hopper", "model_zoo.layers.moe.hopper"
    with interpreted(
        "_experts_product",
        "model_zoo.layers.gemm.hopper.rings",
        "model_zoo.layers.gemm.hopper.gate",
        "model_zoo.layers.gemm.hopper.stream_k",
        f"{packed}.convert",
        f"{packed}.scales",
        f"{packed}.multiply",
        f"{experts}.tile_list",
        f"{experts}.epilogue",
        f"{experts}.kernel",
    ):
        yield


def some_experts(device: str = "cpu", dtype: torch.dtype = FP16, **fields: object) -> Experts:
    sizes: dict[str, object] = {"num_experts": 5, "top_k": 2, "hidden": 256, "inner": 256}
    return make_experts(**{**sizes, **fields}, dtype=dtype, device=device)  # type: ignore[arg-type]


def check(
    experts: Experts,
    tokens: int,
    tiles: HopperTiles,
    kind: str = "balanced",
    shared: Tensor | None = None,
    gate: Tensor | None = None,
) -> None:
    """That the error is that of inner values and outputs rounded to x's type, that a second run has
    the same bits, and that no count of arrivals is left."""
    ids, weights = routing(kind, tokens, experts)
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, experts.hidden, generator=generator)
    x /= experts.gate_up.exact.std() * experts.hidden**0.5  # inner values of about 1
    x = x.to(experts.gate_up.dtype).to(ids.device)
    assert tiles.serves(tokens, experts.gate_up, experts.down)
    y = run_experts(experts, x, ids, weights, shared, gate, tiles)
    exact = exactly(experts, x, ids, weights)
    if shared is not None:
        factor = 1.0 if gate is None else gate.double().cpu().sigmoid()[:, None]
        exact += shared.double().cpu() * factor
    error = (y.double().cpu() - exact).norm() / exact.norm()
    assert y.shape == x.shape and y.dtype == x.dtype
    assert error <= 1.5 * torch.finfo(x.dtype).eps, float(error)
    assert torch.equal(run_experts(experts, x, ids, weights, shared, gate, tiles), y)
    assert int(workspace(x.device)[1].sum()) == 0


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize("tokens", [1, 2, 11])
@pytest.mark.parametrize("kind", ROUTINGS)
def test_tiles_have_the_rows_of_their_experts_tokens(device: str, kind: str, tokens: int):
    """11 tokens of one expert are two tiles."""
    experts = some_experts(device, hidden=96, inner=40)
    for tiles in (SMALL, TWO_WARPGROUPS):
        check(experts, tokens, tiles, kind)


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize("tokens", [1, 2, 11])
def test_experts_of_other_ranks_are_left_out_of_the_sum(device: str, tokens: int):
    experts = some_experts(device, hidden=96, inner=40, own=(2, 4))
    shared = torch.randn(tokens, experts.hidden, device=device).to(FP16)
    for tiles in (SMALL, TWO_WARPGROUPS):
        check(experts, tokens, tiles, shared=shared)


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_rank_without_any_of_the_chosen_experts_adds_the_shared_one_alone(
    device: str, tokens: int
):
    """There is no tile at all."""
    experts = some_experts(device, own=(0, 2))
    shared = torch.randn(tokens, experts.hidden, device=device).to(FP16)
    ids = torch.full((tokens, 2), 2, dtype=torch.int32, device=device)
    weights = torch.ones(tokens, 2, device=device)
    y = run_experts(experts, shared, ids, weights, shared, None, SMALL)
    assert torch.equal(y, shared)


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize("weights", [None, "mxfp4"])
def test_the_widest_tiles(device: str, weights: str | None):
    """One expert has more rows than a tile."""
    experts = some_experts(device, BF16, num_experts=3, inner=96, weights=weights)
    check(experts, 150, HopperTiles(128, 2, 2, 1), "one expert")


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("sync", [True, False])
def test_packed_experts_of_every_kind_are_converted(device: str, sync: bool, name: str):
    experts = some_experts(device, BF16, num_experts=3, weights=name)
    tokens, tiles = (1, SMALL) if sync else (5, TWO_WARPGROUPS)
    check(experts, tokens, replace(tiles, sync=sync))


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize("tokens", [1, 5])
def test_products_are_right_with_fewer_units_in_flight_than_the_rings_have(
    device: str, tokens: int
):
    experts = some_experts(device, BF16, num_experts=3, hidden=1024, inner=640, weights="mxfp4")
    few = replace(SMALL, in_flight=1)
    assert few.ahead(4, 1024) == few.ahead(4, 640) == 1 < SMALL.ahead(4, 1024)
    check(experts, tokens, few)


@pytest.mark.parametrize(
    ("weights", "tiles", "units", "fewer"),
    [
        ("mxfp4", HopperTiles(8, 1, 396, 3, sync=True), 2, 1),
        ("fp8 block", HopperTiles(8, 1, 264, 2), 3, 2),
        (None, HopperTiles(8, 2, 132, 1), 3, 2),
    ],
)
def test_fewer_units_in_flight_are_compared_in_steps(
    weights: str | None, tiles: HopperTiles, units: int, fewer: int
):
    experts = experts_of(weights)
    products = [({None: 16, "fp8 block": 8, "mxfp4": 4}[weights], experts.hidden)]
    [less] = tiles.for_steps(experts.gate_up, experts.down)
    assert [tiles.ahead(*product) for product in products] == [units]
    assert [less.ahead(*product) for product in products] == [fewer]
    assert replace(less, in_flight=tiles.in_flight) == tiles
    assert not less.for_steps(experts.gate_up, experts.down)


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize("activation", ["silu_mul", "gelu_tanh_mul", "clamped_swiglu"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_activations_biases_and_the_shared_expert(device: str, tokens: int, activation: Activation):
    """In columns that fill no block, as the 2880 of gpt-oss."""
    experts = some_experts(
        device, num_experts=3, hidden=160, inner=96, activation=activation, bias=True,
        weights="mxfp4",
    )  # fmt: skip
    shared = torch.randn(tokens, experts.hidden, device=device).to(FP16)
    wide = torch.randn(tokens, 7, device=device).to(FP16)
    for gate in (None, wide[:, 6]):
        check(experts, tokens, SMALL, shared=shared, gate=gate)


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize("half", ["gates", "ups", "shared gate"])
@pytest.mark.parametrize("tokens", [1, 3])
def test_nan_of_a_broken_checkpoint_reaches_the_outputs(device: str, tokens: int, half: str):
    experts = some_experts(device, hidden=96, inner=40, activation="clamped_swiglu")
    ids, weights = routing("balanced", tokens, experts)
    x = torch.ones(tokens, experts.hidden, dtype=FP16, device=device)
    gate = torch.zeros(tokens, dtype=FP16, device=device)
    if half == "shared gate":
        gate[:] = float("nan")
    else:
        weight = experts.gate_up.weight  # [experts, gates before ups, hidden]
        assert weight is not None
        weight[:, 0 if half == "gates" else experts.inner] = float("nan")
    assert run_experts(experts, x, ids, weights, x, gate, SMALL).isnan().all()


@on_cpu
@pytest.mark.usefixtures("on_interpreter")
@pytest.mark.parametrize(
    "weights, tiles",
    [
        (None, TWO_WARPGROUPS),
        ("mxfp4", SMALL),
        pytest.param("fp8 row", TWO_WARPGROUPS, marks=pytest.mark.slow),
        pytest.param("int4 g32 zeros", TWO_WARPGROUPS, marks=pytest.mark.slow),
    ],
)
def test_parts_of_the_columns_of_one_token_are_added(
    device: str, tiles: HopperTiles, weights: str | None
):
    """The bias and the shared expert once; columns that fill no part, as the 2880 of gpt-oss."""
    experts = some_experts(
        device, BF16, num_experts=3, hidden=160, inner=960, bias=True, weights=weights
    )
    bits = {None: 16, "fp8 row": 8}.get(weights, 4)
    units = -(-experts.inner // tiles.ring(bits, experts.inner).columns)
    shared = torch.randn(1, experts.hidden, device=device).to(BF16)
    splits = next(splits for splits in range(2, units + 1) if units % splits == 0)
    for tried in {splits, units}:
        check(experts, 1, replace(tiles, down_splits=tried), shared=shared)
    check(experts, 3, replace(tiles, down_splits=splits))  # of several tokens there are none


def test_programs_have_equal_shares_of_one_tokens_tiles():
    """gpt-oss's 180 in two parts for 396 programs; Qwen3-30B-A3B's 256 are enough for 264."""
    for experts, programs, splits in (
        (experts_of("mxfp4"), 396, {1, 2}),
        (experts_of(None), 264, {1}),
    ):
        stacks = experts.gate_up, experts.down
        found = hopper_candidates(132, 1, experts.top_k, experts.num_experts, *stacks)
        assert {t.down_splits for t in found if t.programs == programs} == splits
        found = hopper_candidates(132, 8, experts.top_k, experts.num_experts, *stacks)
        assert {t.down_splits for t in found} == {1}


def test_experts_that_the_kernels_do_not_know_are_not_served():
    def serves(tokens: int = 8, **fields: object) -> bool:
        experts = some_experts(**fields)  # type: ignore[arg-type]
        return SMALL.serves(tokens, experts.gate_up, experts.down)

    assert serves() and serves(weights="mxfp4")
    assert not serves(10_000), "much memory for rows of x"
    assert not serves(dtype=torch.float32)
    assert not serves(weights="int4 row zeros"), "one zero point a row"
    assert not serves(inner=36), "rows that are not 16-byte aligned"


@pytest.mark.parametrize("weights", [None, "fp8 block", "mxfp4"])
def test_candidates_fit_shared_memory(weights: str | None):
    experts = some_experts(weights=weights)
    for tokens in BUCKETS:
        for sizes in ((8, 128), (4, 32)):
            found = hopper_candidates(132, tokens, *sizes, experts.gate_up, experts.down)
            assert found and len(set(found)) == len(found)
            for tiles in found:
                bits = {None: 16, "fp8 block": 8, "mxfp4": 4}[weights]
                for inputs in (768, 2048, 2880):
                    ring = tiles.ring(bits, inputs)
                    unit = tiles.groups * 64 * ring.columns * bits // 8
                    used = ring.stages * unit + ring.x_stages * tiles.rows * ring.columns * 2
                    assert used * tiles.resident <= 220 << 10 and ring.stages >= 2


def test_no_hopper_kernel_is_tried_without_a_gpu_of_compute_capability_9_0():
    from model_zoo.layers.moe.tiles import candidates

    experts = some_experts()
    assert not any(isinstance(tiles, HopperTiles) for tiles in candidates(1, experts))


SHAPES = {  # with fewer experts: Qwen3-30B-A3B's, gpt-oss's, and one of no whole tile or unit
    "qwen3": {"num_experts": 12, "top_k": 8, "hidden": 2048, "inner": 768},
    "gpt-oss": {
        "num_experts": 6, "top_k": 4, "hidden": 2880, "inner": 2880, "bias": True,
        "activation": "clamped_swiglu",
    },
    "uneven": {"num_experts": 9, "top_k": 3, "hidden": 648, "inner": 328},
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weights", [None, "fp8 block", "mxfp4", "int4 g128", "nvfp4"])
def test_every_candidate_is_right_at_true_shapes(weights: str | None, shape: str):
    if shape == "uneven" and weights == "fp8 block":
        pytest.skip("blocks of 128 rows are those of one expert's gates or ups")
    if shape == "gpt-oss" and weights in ("fp8 block", "int4 g128"):
        pytest.skip("2880 columns are no whole groups of 128")
    if shape == "uneven" and weights is not None:
        pytest.skip("648 columns are no whole groups")
    experts = some_experts("cuda", BF16, weights=weights, **SHAPES[shape])
    tried = [
        (tokens, tiles)
        for tokens in (1, 2, 5, 8, 16, 40, 150)
        for tiles in hopper_candidates(
            132, tokens, experts.top_k, experts.num_experts, experts.gate_up, experts.down
        )
    ]
    assert len(tried) > 10
    with compiling_only(Compilers()):  # on all cores
        for tokens, tiles in tried:
            x = torch.zeros(tokens, experts.hidden, dtype=BF16, device="cuda")
            run_experts(experts, x, *routing("balanced", tokens, experts), tiles=tiles)
    for tokens, tiles in tried:
        for kind in ROUTINGS:
            check(experts, tokens, tiles, kind)
    shared = torch.randn(1, experts.hidden, device="cuda").to(BF16)
    for tiles in (tiles for tokens, tiles in tried if tokens == 1):
        check(experts, 1, tiles, shared=shared, gate=shared[:, 0])


@pytest.mark.gpu
def test_experts_that_were_not_chosen_are_not_multiplied():
    experts = some_experts("cuda", BF16, num_experts=8)
    ids, weights = routing("few experts", 6, experts)
    others = sorted(set(range(8)) - set(ids.flatten().tolist()))
    for stack in (experts.gate_up, experts.down):
        stack.weight[others] = float("nan")
    x = torch.randn(6, experts.hidden, device="cuda").to(BF16)
    assert others and run_experts(experts, x, ids, weights, tiles=SMALL).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "fp8 block", "mxfp4"])
def test_a_graph_of_layers_replays_other_routings(weights: str | None):
    """Each layer's second product reads the list of its tiles before it waits for the first."""
    experts = some_experts("cuda", BF16, num_experts=16, top_k=4, inner=1024, weights=weights)
    first = {
        tokens: hopper_candidates(132, tokens, 4, 16, experts.gate_up, experts.down)[0]
        for tokens in (1, 7, 60)
    }
    for tokens, tiles in (*first.items(), (1, replace(first[1], down_splits=2))):
        x = torch.randn(tokens, 256, device="cuda").to(BF16)
        x /= experts.gate_up.exact.std() * 16
        ids, scores = routing("balanced", tokens, experts)
        run_experts(experts, x, ids, scores, tiles=tiles)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ys = [run_experts(experts, x, ids, scores, tiles=tiles) for _ in range(20)]
        for kind in (*ROUTINGS, "balanced"):
            others, weights_of = routing(kind, tokens, experts)
            ids.copy_(others.flip(0))
            scores.copy_(weights_of)
            graph.replay()
            exact = exactly(experts, x, others.flip(0), weights_of)
            assert all(torch.equal(y, ys[0]) for y in ys)
            assert (ys[0].double().cpu() - exact).norm() <= 0.01 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [None, "fp8 block"])
def test_a_gpu_leaves_out_the_experts_of_other_ranks(weights: str | None):
    """Of some tokens all are elsewhere, and then of every token."""
    sizes = {"num_experts": 16, "top_k": 4, "own": (8, 12)}
    experts = some_experts("cuda", BF16, weights=weights, **sizes)
    for tokens in (1, 6, 64):
        shared = torch.randn(tokens, experts.hidden, device="cuda").to(BF16)
        elsewhere = torch.full((tokens, 4), 4, dtype=torch.int32, device="cuda")
        ones = torch.ones(tokens, 4, device="cuda")
        for tiles in hopper_candidates(3, tokens, 4, 16, experts.gate_up, experts.down):
            check(experts, tokens, tiles, shared=shared)
            y = run_experts(experts, shared, elsewhere, ones, shared, None, tiles)
            assert torch.equal(y, shared)
