"""Every kernel over a small case, for compute-sanitizer to watch: python tests/sanitized.py."""

from __future__ import annotations

from dataclasses import replace

import torch
from attention_oracle import check, make_case
from decode_runner import PLANNERS, decoded, most

from attention.kernels.flash1 import flash1
from attention.kernels.write_kv import write_kv

# The last row is the longest, so that its pages end where the table's memory does.
ROWS = [(1, 70), (1, 0), (3, 50), (40, 90), (0, 20), (1, 129)]


def main() -> None:
    for features in ({}, {"window": 20, "sinks": True}):
        case = make_case(ROWS, head_dim=128, device="cuda", **features)
        case = replace(case, page_table=case.page_table[:, :9].contiguous())
        for planner in PLANNERS:
            check(case, *decoded(case, planner, max_q_len=4), served=most(4))
        out, lse = case.results()
        flash1(
            case.q,
            case.k,
            case.v,
            case.page_table,
            case.cu_seqlens_q,
            case.cache_seqlens,
            out,
            lse,
            window=case.window,
            **case.features,
        )
        check(case, out, lse)
        new = torch.randn(len(case.q), case.kv_heads, 128, device="cuda").to(case.k.dtype)
        write_kv(new, new, case.k, case.v, case.write_slots)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
