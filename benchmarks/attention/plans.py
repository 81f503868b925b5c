"""Times the planner kernels, which run once per step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

from attention.planner.device_planner import PLANNERS, DevicePlanner
from attention.planner.prefill_tiles_device import DeviceTiler
from benchmarks.attention.cases import AttentionCase
from benchmarks.attention.grids import ALL_HEADS, DISTRIBUTIONS
from benchmarks.attention.subjects import decoding, prompting
from benchmarks.attention.timing import Timer, time_one

STEPS = ((1, 256), (32, 256), (256, 256), (1024, 1024))  # rows, and the most that there may be
MAX_TOKENS = 8192  # of a step with prompts


def measure_plans(device: torch.device, timer: Timer, planners: Sequence[str]) -> dict[str, float]:
    """Microseconds of one launch, by planner, rows and heads; lengths are lognormal."""
    print("\nplan: a step's plan on the device, us")
    for planner in planners:
        if planner not in PLANNERS:
            print(f"{planner:>8}: has no device planner")
    found: dict[str, float] = {}
    for name, maker, case in planned_steps(device, planners):
        cu_seqlens_q = torch.arange(case.rows + 1, dtype=torch.int32, device=device)
        cu_seqlens_q *= case.q_lens[0]
        cache_seqlens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
        lengths = (cu_seqlens_q, cache_seqlens)
        found[name] = time_one(timer, lambda _, plan=maker.plan, lengths=lengths: plan(*lengths))
        print(f"{found[name]:>8.2f}  {name}", flush=True)
    return found


def planned_steps(
    device: torch.device, planners: Sequence[str]
) -> Iterator[tuple[str, DevicePlanner | DeviceTiler, AttentionCase]]:
    """(name, what plans it, the step): split plans of decoding rows, tiles of prompts."""
    for heads in ALL_HEADS:
        for rows, max_rows in STEPS:
            lengths = tuple(DISTRIBUTIONS["lognormal 2k"](random.Random(rows), rows))
            case = AttentionCase(f"{rows} rows", (1,) * rows, lengths, *heads)
            size = f"{rows} of {max_rows} rows, {case.heads_name} heads"
            for planner in planners:
                if planner in PLANNERS:
                    maker = DevicePlanner(
                        decoding(case, planner, device)[1],
                        planner,
                        max_rows=max_rows,
                        group=case.group,
                        head_dim=case.head_dim,
                        device=device,
                    )
                    yield f"{planner}, {size}", maker, case
    for rows, q_len in ((1, 8192), (16, 512), (256, 32)):
        case = AttentionCase(f"{rows} prompts", (q_len,) * rows, (q_len,) * rows, 32, 8)
        tiler = DeviceTiler(
            prompting(case, device)[1],
            max_tokens=MAX_TOKENS,
            max_rows=256,
            head_dim=case.head_dim,
            device=device,
        )
        yield f"tiles, {rows} x {q_len} tokens, 32/8 heads", tiler, case
