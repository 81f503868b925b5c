"""y of each token from the weighted outputs of its experts, in plain Triton.

sum_pairs
  grid      (T, runs of BLOCK outputs)
  reads     parts [T k, N]; the shared expert's output [T, N] and gate [T], if there are any; ids
            [T, k], where a rank has OWN of the experts and parts of these alone (OWN 0: it has all)
  writes    y [T, N]: the sum in the order of the token's experts, in float32
  bound     memory: the parts, which are in the L2 cache
  checked   tests/model_zoo/layers/moe/test_hopper_experts.py
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attention.common.dependent_launch import dependent_launch, wait_for_launcher
from model_zoo.layers.moe.few_tokens import add_shared

BLOCK = 1024


@triton.jit(do_not_specialize=["gate_stride"], do_not_specialize_on_alignment=["SHARED_GATE"])
def _sum_pairs(
    PARTS, IDS, SHARED, SHARED_GATE, OUT, N, gate_stride, TOP_K: tl.constexpr, OWN: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        wait_for_launcher()
    token = tl.program_id(0) + tl.arange(0, 1)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (n < N)[:, None]
    first = PARTS + (token * TOP_K).to(tl.int64)[None, :] * N + n[:, None]
    total = tl.zeros([BLOCK, 1], tl.float32)
    for j in tl.static_range(TOP_K):
        mine = real
        if OWN > 0:
            mine &= (tl.load(IDS + token * TOP_K + j) < OWN)[None, :]
        total += tl.load(first + j * N, mask=mine, other=0.0).to(tl.float32)
    total = add_shared(total, SHARED, SHARED_GATE, token, n, real, N, gate_stride)
    at = OUT + token.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(at, total.to(OUT.dtype.element_ty), mask=real)


def sum_pairs(
    parts: Tensor,
    out: Tensor,
    ids: Tensor,
    own: int,
    shared: Tensor | None,
    shared_gate: Tensor | None,
) -> None:
    """parts [T k, N] -> out [T, N].

    ids: [T, k] int32, as in Experts.forward; own: the experts that are here, 0 for all
    """
    tokens, outputs = out.shape
    _sum_pairs[(tokens, triton.cdiv(outputs, BLOCK))](
        parts, ids, shared, shared_gate, out, outputs,
        0 if shared_gate is None else shared_gate.stride(0), TOP_K=ids.shape[1], OWN=own,
        BLOCK=BLOCK,
        **dependent_launch(out.device),
    )  # fmt: skip
