# apply_rows: what requests say of sampling moves into their slots.
#   grid      (N,), fixed, so that a graph can capture it
#   reads     block [N, WIDTH] int32, each row for the slot that its first word names
#   writes    rows [slots, WIDTH] int32
#   skips     rows that name a negative slot
#   checked   tests/runtime/sampling/test_sampler_state.py
from __future__ import annotations

import triton
import triton.language as tl

from attention.common.dependent_launch import start_successor_and_wait
from runtime.sampling.kernels.row import WIDTH

LANES = tl.constexpr(32)


@triton.jit(do_not_specialize_on_alignment=["block"])
def apply_rows(block, rows, DEPENDENT: tl.constexpr):
    place = tl.program_id(0)
    if DEPENDENT:
        start_successor_and_wait()
    word = tl.arange(0, LANES)
    values = tl.load(block + place * WIDTH + word, mask=word < WIDTH, other=0)
    slot = tl.load(block + place * WIDTH).to(tl.int64)
    if slot >= 0:
        tl.store(rows + slot * WIDTH + word, values, mask=word < WIDTH)
