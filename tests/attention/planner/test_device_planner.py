"""The plan made on the device is the plan made in numpy, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attention.planner.device_planner import PLANNERS, DevicePlanner
from attention.planner.split_plan import HostSplitPlan, Int32Array, SplitPlan, SplitPlanSpec
from attention.planner.tuning import PLANNERS as HOST

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# One compilation each.  Programs: of 78, 108 and 132 SMs, and several a SM; one that cuts nothing.
SPECS = [
    pytest.param(SplitPlanSpec(8, 132), marks=pytest.mark.slow),
    pytest.param(SplitPlanSpec(1, 264, work_tile_cost=12, min_blocks=1), marks=pytest.mark.slow),
    SplitPlanSpec(2, 396, max_q_len=8, window=1000, block=16),
    pytest.param(
        SplitPlanSpec(5, 78, max_q_len=4, work_tile_cost=0, block=128), marks=pytest.mark.slow
    ),
    SplitPlanSpec(3, 108, window=64, work_tile_cost=30, min_blocks=4),
    SplitPlanSpec(4, 1),
]
# (kv_heads, programs): from 1 plan (5 heads) to 12 beside each other, of 22 to 264 programs.
HEADS = [(heads, programs) for heads in (1, 2, 5, 8, 12) for programs in (78, 132, 264)]
FEW_HEADS = {(1, 264), (5, 78), (12, 132)}


def batch(random: np.random.Generator, num_rows: int) -> tuple[Int32Array, Int32Array]:
    """cu_seqlens_q, cache_seqlens: equal, even, skewed or short rows; some prefill, some absent."""
    shape = random.choice(["equal", "even", "skewed", "one long"])
    longest = int(random.choice([1, 70, 1000, 9000, 200_000]))
    kv_lens = random.integers(0, longest + 1, num_rows)
    if shape == "equal":
        kv_lens[:] = longest
    elif shape == "skewed":
        kv_lens = np.minimum(np.exp(random.normal(5, 2.5, num_rows)), longest)
    elif shape == "one long":
        kv_lens[random.integers(num_rows)] = 1_000_000
    kv_lens = kv_lens * (random.random(num_rows) >= random.choice([0, 0.1, 0.9]))
    q_lens = random.choice(
        [[1, 1, 1, 1], [0, 1, 1, 1], [0, 3, 8, 300]][random.integers(3)], num_rows
    )
    cu_seqlens_q = np.append(0, np.cumsum(q_lens)).astype(np.int32)
    return cu_seqlens_q, np.maximum(kv_lens, q_lens * (q_lens > 1)).astype(np.int32)


def make(planner: str, spec: SplitPlanSpec, max_rows: int, device: str) -> DevicePlanner:
    return DevicePlanner(
        spec, planner, max_rows=max_rows, group=1, head_dim=8, device=torch.device(device)
    )


def run(
    planner: DevicePlanner, device: str, cu_seqlens_q: Int32Array, kv_lens: Int32Array
) -> SplitPlan:
    return planner.plan(
        torch.from_numpy(cu_seqlens_q).to(device), torch.from_numpy(kv_lens).to(device)
    )


def assert_same(plan: SplitPlan, host: HostSplitPlan) -> None:
    np.testing.assert_array_equal(plan.starts.cpu().numpy(), host.starts)
    np.testing.assert_array_equal(plan.merges.cpu().numpy(), host.merges)
    np.testing.assert_array_equal(plan.work[: len(host.work)].cpu().numpy(), host.work)
    assert plan.queued == host.queued and int(plan.queue) == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("planner", HOST)
def test_device_plan_equals_the_host_plan(planner: str, spec: SplitPlanSpec, device: str) -> None:
    random = np.random.default_rng(spec.programs)
    device_planner = make(planner, spec, 64, device)
    for num_rows in [1, 1, 2, 3, 7, 17, 33, 48, 63, 64] * (1 if device == "cpu" else 20):
        device_planner._plan.queue.fill_(7)  # what a step leaves behind
        cu_seqlens_q, kv_lens = batch(random, num_rows)
        host = HOST[planner](cu_seqlens_q, kv_lens, spec)
        assert_same(run(device_planner, device, cu_seqlens_q, kv_lens), host)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kv_heads", "programs"),
    [pytest.param(*one, marks=() if one in FEW_HEADS else pytest.mark.slow) for one in HEADS],
)
def test_heads_that_are_interleaved_are_planned_alike_on_both(
    kv_heads: int, programs: int, device: str
) -> None:
    random = np.random.default_rng(kv_heads * programs)
    spec = SplitPlanSpec(kv_heads, programs, max_q_len=4)
    device_planner = make("stream-k", spec, 32, device)
    for num_rows in [1, 5, 32] * (1 if device == "cpu" else 20):
        cu_seqlens_q, kv_lens = batch(random, num_rows)
        host = HOST["stream-k"](cu_seqlens_q, kv_lens, spec)
        device_planner._plan.work.fill_(-1)
        plan = run(device_planner, device, cu_seqlens_q, kv_lens)
        assert_same(plan, host)
        assert (plan.work[len(host.work) :] == -1).all(), "written past the pieces"


@pytest.mark.parametrize(
    ("device", "max_rows"),
    [("cpu", 1), ("cpu", 256), pytest.param("cpu", 1024, marks=pytest.mark.slow)]
    + [pytest.param("cuda", n, marks=pytest.mark.gpu) for n in (1, 256, 1000, 1024, 2500)],
)
@pytest.mark.parametrize("planner", HOST)
def test_plans_of_any_capacity_are_the_same(planner: str, max_rows: int, device: str) -> None:
    random = np.random.default_rng(max_rows)
    spec = SplitPlanSpec(2, 264)
    device_planner = make(planner, spec, max_rows, device)
    for num_rows in [max_rows] if device == "cpu" else [max_rows, max_rows // 2 + 1] * 20:
        cu_seqlens_q, kv_lens = batch(random, num_rows)
        host = HOST[planner](cu_seqlens_q, kv_lens, spec)
        assert_same(run(device_planner, device, cu_seqlens_q, kv_lens), host)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("planner", HOST)
def test_sums_past_int32_are_planned_alike(planner: str, device: str) -> None:
    spec = SplitPlanSpec(8, 132, block=16, window=0)
    kv_lens = np.full(200, 4_000_000, dtype=np.int32)
    kv_lens[::3] = 100_000
    cu_seqlens_q = np.arange(201, dtype=np.int32)
    assert (kv_lens.astype(np.int64) // 2 * 8).sum() > 1 << 31
    host = HOST[planner](cu_seqlens_q, kv_lens, spec)
    assert_same(run(make(planner, spec, 256, device), device, cu_seqlens_q, kv_lens), host)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("planner", HOST)
def test_a_smaller_step_leaves_nothing_of_the_one_before(planner: str, device: str) -> None:
    spec = SplitPlanSpec(2, 78)
    device_planner = make(planner, spec, 32, device)
    for num_rows, q_len, kv_len in ((3, 1, 5000), (2, 1, 5000), (5, 0, 5000), (1, 1, 5000),
                                    (4, 1, 0), (0, 1, 0)):  # fmt: skip
        cu_seqlens_q = np.arange(num_rows + 1, dtype=np.int32) * q_len
        kv_lens = np.full(num_rows, kv_len, dtype=np.int32)
        host = HOST[planner](cu_seqlens_q, kv_lens, spec)
        assert host.merges[:, 1].any() == (num_rows * q_len * kv_len > 0)
        assert len(host.work) >= num_rows * q_len * spec.kv_heads, "empty rows are served too"
        plan = run(device_planner, device, cu_seqlens_q, kv_lens)
        assert_same(plan, host)


@pytest.mark.parametrize("planner", HOST)
def test_more_rows_than_the_capacity_are_refused_by_number(planner: str) -> None:
    device_planner = make(planner, SplitPlanSpec(2, 78), 4, "cpu")
    cu_seqlens_q, kv_lens = np.arange(6, dtype=np.int32), np.full(5, 9, dtype=np.int32)
    with pytest.raises(ValueError, match=r"5 rows.*max_rows=4"):
        run(device_planner, "cpu", cu_seqlens_q, kv_lens)


def test_an_unknown_planner_is_refused_by_name() -> None:
    assert set(PLANNERS) == set(HOST)
    with pytest.raises(ValueError, match=r"`fa9`: use stream-k, greedy or fa3"):
        make("fa9", SplitPlanSpec(2, 78), 4, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("planner", HOST)
def test_a_captured_graph_plans_the_lengths_it_finds(planner: str) -> None:
    random = np.random.default_rng(0)
    spec = SplitPlanSpec(8, 264, max_q_len=4)
    device_planner = make(planner, spec, 256, "cuda")
    cu_seqlens_q = torch.zeros(257, dtype=torch.int32, device="cuda")
    kv_lens = torch.zeros(256, dtype=torch.int32, device="cuda")
    device_planner.plan(cu_seqlens_q, kv_lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = device_planner.plan(cu_seqlens_q, kv_lens)
    for num_rows in random.integers(1, 257, 50):
        host_cu_seqlens_q, host_kv_lens = batch(random, 256)
        host_cu_seqlens_q[num_rows + 1 :] = host_cu_seqlens_q[num_rows]  # the others are padding
        cu_seqlens_q.copy_(torch.from_numpy(host_cu_seqlens_q))
        kv_lens.copy_(torch.from_numpy(host_kv_lens))
        graph.replay()
        assert_same(plan, HOST[planner](host_cu_seqlens_q, host_kv_lens, spec))
