"""The attention kernels on a small case, for compute-sanitizer.

    python -m tests.support.attention.sanitized_attention NAME ...

decode   by the plan of each planner, and combine
flash1   and write_kv
prefill  by a plan that cuts tiles, and their merge
backend  flash2 as a model runs it: planners on the device, and the kernels chosen for it
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch

from attention.common.flash1 import flash1
from attention.common.write_kv import write_kv
from tests.support.attention.attention_oracle import OracleCase, check, make_case
from tests.support.attention.backend_step import attended, back_end
from tests.support.attention.decode_kernel_runner import PLANNERS, decoded, most
from tests.support.attention.prefill_kernel_runner import run as prefilled

# The last row is the longest, so that its pages end where the table's memory does.
ROWS = [(1, 70), (1, 0), (3, 50), (40, 90), (0, 20), (1, 129)]


def decode(case: OracleCase) -> None:
    for planner in PLANNERS:
        check(case, *decoded(case, planner, max_q_len=4), served=most(4))


def flash(case: OracleCase) -> None:
    out, lse = case.results()
    flash1(case.inputs(out, lse), case.cu_seqlens_q, case.cache_seqlens, window=case.window)
    check(case, out, lse)
    new = torch.randn(len(case.q), case.kv_heads, 128, device="cuda").to(case.k.dtype)
    write_kv(new, new, case.k, case.v, case.slot_mapping)


def prefill(case: OracleCase) -> None:
    out, lse, tiles = prefilled(case, programs=60)
    assert tiles.counts[1] > 0
    check(case, out, lse)


def backend(case: OracleCase) -> None:
    check(case, *attended(case, back_end(case, "flash2", windows=(case.window,))))


KERNELS: dict[str, Callable[[OracleCase], None]] = {
    "decode": decode, "flash1": flash, "prefill": prefill, "backend": backend,
}  # fmt: skip


def main() -> None:
    for name in sys.argv[1:]:
        for features in ({}, {"window": 20, "sinks": True}):
            case = make_case(ROWS, head_dim=128, device="cuda", **features)
            table = case.page_table[:, :9].contiguous()
            KERNELS[name](replace(case, page_table=table))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
