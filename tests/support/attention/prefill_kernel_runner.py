"""Runs a prefill kernel over a case, with every buffer of its plan poisoned first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from attention.planner.prefill_tiles import TilePlan, TileSpec
from attention.prefill.prefill import prefill
from tests.support.attention.attention_oracle import OracleCase
from tests.support.attention.host_tiles import HostTiles, load, plan_tiles

# Small tiles, so that a few tokens make several of them and the interpreter stays quick.
SMALL = {"block_m": 32, "block_n": 32, "min_q_len": 1, "programs": 3, "min_blocks": 1}


def host_plan(case: OracleCase, spec: TileSpec) -> HostTiles:
    cu_seqlens_q, cache_seqlens = (
        lens.cpu().numpy().astype(np.int32) for lens in (case.cu_seqlens_q, case.cache_seqlens)
    )
    return plan_tiles(cu_seqlens_q, cache_seqlens, spec)


def run(
    case: OracleCase, kernel: Callable[..., None] = prefill, **options: Any
) -> tuple[Tensor, Tensor, TilePlan]:
    """(out, lse) of the rows that the plan serves, NaN in the others; options are of TileSpec."""
    spec = TileSpec(
        kv_heads=case.kv_heads, group=case.group, window=case.window, **{**SMALL, **options}
    )
    tiles = TilePlan.allocate(
        spec,
        max_tokens=len(case.q),
        max_rows=len(case.rows),
        head_dim=case.q.shape[-1],
        device=case.q.device,
    )
    tiles.partial_out.fill_(float("nan"))
    tiles.partial_lse.fill_(float("nan"))
    tiles.items.fill_(-1)
    load(tiles, host_plan(case, spec))
    out, lse = case.results()
    kernel(case.inputs(out, lse), tiles)
    assert int(tiles.queue) == 0
    return out, lse, tiles
