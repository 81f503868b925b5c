"""Random batches and specs for the tests of planners, on the host and on the device."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from attention.planner.split_plan import HEAD, ROW, HostSplitPlan, SplitPlanSpec
from attention.planner.tuning import PLANNERS

__all__ = ["PLANNERS", "batches", "specs", "units_of"]


@st.composite
def specs(draw: st.DrawFn) -> SplitPlanSpec:
    return SplitPlanSpec(
        kv_heads=draw(st.integers(1, 16)),
        programs=draw(st.sampled_from([1, 2, 7, 78, 108, 132, 264, 396])),
        max_q_len=draw(st.integers(1, 8)),
        window=draw(st.sampled_from([0, 0, 1, 128, 4096])),
        block=draw(st.sampled_from([16, 64, 128])),
        work_tile_cost=draw(st.sampled_from([0, 1, 8, 30])),
        merge_cost=draw(st.sampled_from([0, 8, 20])),
        merge_tile_cost=draw(st.sampled_from([0, 1, 5])),
        min_blocks=draw(st.integers(1, 4)),
    )


@st.composite
def batches(draw: st.DrawFn, max_rows: int = 1024) -> tuple[np.ndarray, np.ndarray]:
    """cu_seqlens_q, cache_seqlens: equal, even, skewed or short rows; some prefill, some absent."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    most = draw(st.sampled_from([3, 12, max_rows, max_rows]))
    num_rows = int(random.integers(0, most + 1))
    longest = draw(st.sampled_from([1, 70, 1000, 9000, 200_000]))
    shape = draw(st.sampled_from(["equal", "even", "skewed"]))
    if shape == "equal":
        kv_lens = np.full(num_rows, random.integers(0, longest + 1))
    elif shape == "even":
        kv_lens = random.integers(0, longest + 1, num_rows)
    else:
        kv_lens = np.minimum(np.exp(random.normal(5, 2.5, num_rows)), longest)
    q_lens = random.choice(draw(st.sampled_from([[1], [0, 1], [0, 1, 2, 5, 8, 9, 300]])), num_rows)
    cu_seqlens_q = np.append(0, np.cumsum(q_lens)).astype(np.int32)
    return cu_seqlens_q, np.maximum(kv_lens, q_lens * (q_lens > 1)).astype(np.int32)


def units_of(plan: HostSplitPlan) -> dict[tuple[int, int], np.ndarray]:
    """Indices of the work tiles of each (row, KV head), in the order of `work`."""
    units: dict[tuple[int, int], list[int]] = {}
    for index, tile in enumerate(plan.work.tolist()):
        units.setdefault((tile[ROW], tile[HEAD]), []).append(index)
    return {unit: np.array(indices) for unit, indices in units.items()}
