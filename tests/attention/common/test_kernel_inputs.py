"""Tensors that the attention kernels would misread are refused before a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from attention.common.kernel_inputs import KernelInputs
from attention.prefill.prefill import prefill_config
from tests.support.attention.attention_oracle import FP8, OracleCase, make_case
from tests.support.attention.decode_kernel_runner import make_plan, run
from tests.support.attention.prefill_kernel_runner import run as run_prefill

HEADS, KV_HEADS = 4, 2
WRONG: dict[str, Callable[[KernelInputs], KernelInputs]] = {
    "other head_dim of keys": lambda x: replace(x, k=x.k[..., :32], v=x.v[..., :32]),
    "no group": lambda x: replace(x, q=x.q[:, :3], out=x.out[:, :3]),
    "out of other tokens": lambda x: replace(x, out=x.out[1:]),
    "out of another type": lambda x: replace(x, out=x.out.float()),
    "keys of another type": lambda x: replace(x, k=x.k.float(), v=x.v.float()),
    "a table of int64": lambda x: replace(x, page_table=x.page_table.long()),
    "a table by columns": lambda x: replace(x, page_table=x.page_table.t().contiguous().t()),
    "lse by heads": lambda x: replace(x, lse=torch.zeros(HEADS, len(x.q)).t()),
    "lse in half": lambda x: replace(x, lse=torch.zeros(len(x.q), HEADS).half()),
    "sinks in bfloat16": lambda x: replace(x, sinks=torch.zeros(HEADS).bfloat16()),
    "sinks of KV heads": lambda x: replace(x, sinks=torch.zeros(KV_HEADS)),
    "sinks at a stride": lambda x: replace(x, sinks=torch.zeros(2 * HEADS)[::2]),
    "a scale without float8": lambda x: replace(x, k_scale=torch.ones(KV_HEADS)),
}


def made(case: OracleCase) -> KernelInputs:
    return case.inputs(*case.results())


@pytest.mark.parametrize("name", WRONG)
def test_inputs_that_kernels_would_misread_are_refused(name: str):
    inputs = made(make_case([(1, 40), (3, 20)]))
    with pytest.raises(AssertionError):
        WRONG[name](inputs)


def test_scales_of_float8_pages_are_one_for_each_kv_head():
    inputs = made(make_case([(1, 5)], kv_dtype=FP8))
    assert inputs.k_scale is not None
    for scale in (None, inputs.k_scale[:1], inputs.k_scale.double()):
        with pytest.raises(AssertionError):
            replace(inputs, v_scale=scale)


def test_plans_for_other_tiles_or_heads_are_refused():
    case = make_case([(1, 40)])
    edge = prefill_config(64, torch.bfloat16).edge_n
    with pytest.raises(AssertionError, match="other tiles"):
        run_prefill(case, block_n=edge // 2)
    with pytest.raises(AssertionError, match="other heads"):
        run(case, make_plan(make_case([(1, 40)], kv_heads=3))[0])
