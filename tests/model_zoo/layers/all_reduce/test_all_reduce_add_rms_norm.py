"""The all-reduce with residual sum and norm: its arithmetic, its bits, its barrier."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm
from model_zoo.layers.all_reduce.add_rms_norm_quantize import all_reduce_add_rms_norm_quantize
from model_zoo.layers.all_reduce.symmetric_buffers import (
    SymmetricBuffers,
    allocation_bytes,
    in_one_process,
)
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import ScaleKind
from tests.support.parallel import all_reduce_ranks
from tests.support.paths import ROOT

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [pytest.param(BF16, marks=pytest.mark.gpu), FP16, FP32]
DIGIT = {FP32: 2e-6, FP16: 2**-10, BF16: 2**-7}
EPS = 1e-5


def group_of(
    world: int, max_rows: int, size: int, dtype: torch.dtype, device: str
) -> list[SymmetricBuffers]:
    """All ranks of a group, in one address space."""
    count = allocation_bytes(max_rows, size, dtype, world)
    memories = [torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(world)]
    return [in_one_process(memories, rank, max_rows, size, dtype) for rank in range(world)]


def fill(ranks: list[SymmetricBuffers], turn: int, rows: int) -> list[Tensor]:
    """Random parts, written where each rank's product would write them."""
    parts = []
    for buffers in ranks:
        part = buffers.part(turn, rows)
        part.copy_(torch.randn(part.shape, device=part.device))
        parts.append(part.clone())
    return parts


def norm(x: Tensor, weight: Tensor, plus_one: bool) -> Tensor:
    """In float64, where weight + 1 multiplies with plus_one."""
    wide = x.double()
    factor = (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return wide * factor * (weight.double() + plus_one)


@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 96), (9, 1000)])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_have_the_bits_of_one_sum_and_its_norm(
    device: str, dtype: torch.dtype, world: int, rows: int, size: int
):
    torch.manual_seed(rows)
    ranks = group_of(world, 9, size, dtype, device)
    parts = fill(ranks, 1, rows)
    residual = torch.randn(rows, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    sums = [residual.clone() for _ in ranks]
    outs = [
        all_reduce_add_rms_norm(buffers, 1, total, weight, EPS, barrier=False)
        for buffers, total in zip(ranks, sums, strict=True)
    ]
    exact = sum(part.double() for part in parts) + residual.double()
    torch.testing.assert_close(sums[0].double(), exact, rtol=0.51 * DIGIT[dtype], atol=1e-5)
    expected = norm(sums[0], weight, False)
    torch.testing.assert_close(outs[0].double(), expected, rtol=1.1 * DIGIT[dtype], atol=1e-6)
    for total, out in zip(sums, outs, strict=True):
        assert torch.equal(total, sums[0]) and torch.equal(out, outs[0])


def test_parts_are_added_in_the_order_of_the_ranks(device: str):
    ranks = group_of(3, 1, 64, FP32, device)
    for buffers, value in zip(ranks, (1e8, 1.0, -1e8), strict=True):
        buffers.part(0, 1).fill_(value)
    for buffers in ranks:
        residual = torch.zeros(1, 64, device=device)
        all_reduce_add_rms_norm(buffers, 0, residual, residual[0] + 1, EPS, barrier=False)
        # 1e8 + 1 is 1e8 in float32; in another order a 1 would be left.
        assert not residual.any()


@pytest.mark.parametrize("plus_one", [False, True])
def test_the_sum_of_the_parts_may_be_normed_before_it_is_added(device: str, plus_one: bool):
    torch.manual_seed(3)
    ranks = group_of(2, 4, 96, FP32, device)
    parts = fill(ranks, 0, 4)
    residual = torch.randn(4, 96, device=device)
    weight, post = (torch.randn(96, device=device) for _ in range(2))
    exact = residual.double() + norm(parts[0] + parts[1], post, plus_one)
    for buffers in ranks:
        total = residual.clone()
        out = all_reduce_add_rms_norm(
            buffers, 0, total, weight, EPS, post_weight=post, plus_one=plus_one, barrier=False
        )
        torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            out.double(), norm(total, weight, plus_one), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kind", ["row", "block", "int8", "int8 zeros"])
@pytest.mark.parametrize("rows", [1, 5])
def test_codes_are_those_of_the_norm_that_is_written_without_them(
    device: str, kind: ScaleKind, rows: int
):
    torch.manual_seed(6)
    ranks = group_of(2, 5, 256, FP16, device)
    fill(ranks, 1, rows)
    residual = torch.randn(rows, 256, device=device, dtype=FP16)
    weight = torch.randn(256, device=device, dtype=FP16)
    plain, fused = residual.clone(), residual.clone()
    normed = all_reduce_add_rms_norm(ranks[0], 1, plain, weight, EPS, barrier=False)
    expected = quantize_rows(normed, kind)
    found = all_reduce_add_rms_norm_quantize(ranks[1], 1, fused, weight, EPS, kind, barrier=False)
    assert torch.equal(fused, plain)
    codes = [each.codes.view(torch.uint8)[:rows] for each in (found, expected)]
    assert torch.equal(*codes)
    assert not found.codes[rows:].float().any() or found.zeros is not None
    assert torch.equal(found.scales, expected.scales) and found.count == expected.count == rows
    if found.zeros is not None:
        assert torch.equal(found.zeros[:rows], expected.zeros[:rows])


def test_a_turn_has_a_buffer_of_its_own_and_signals_are_beside_both(device: str):
    ranks = group_of(2, 5, 96, FP16, device)
    buffers = ranks[0]
    for turn, value in ((0, 1.0), (1, 2.0)):
        buffers.part(turn, 5).fill_(value)
    assert (buffers.part(0, 5) == 1).all() and (buffers.part(1, 5) == 2).all()
    pad = buffers.memory[2 * buffers.turn_elements * 2 :]
    assert not pad.any() and pad.numel() == 2 * 1024 * 4
    assert int(buffers.pads[0]) == pad.data_ptr() and pad.data_ptr() % 16 == 0


def test_no_rows_launch_nothing(device: str):
    buffers = group_of(2, 5, 96, FP32, device)[0]
    empty = torch.empty(0, 96, device=device)
    # With the barrier: it would wait for another rank for ever.
    assert all_reduce_add_rms_norm(buffers, 0, empty, torch.ones(96), EPS).shape == (0, 96)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the ranks are interpreted")
@pytest.mark.parametrize("world", [2, 3])
def test_processes_that_are_late_by_turns_get_the_same_bits_of_every_call(
    tmp_path: Path, world: int
):
    calls = 40
    size = allocation_bytes(
        all_reduce_ranks.MAX_ROWS, all_reduce_ranks.SIZE, all_reduce_ranks.DTYPE, world
    )
    for rank in range(world):
        (tmp_path / f"{rank}.memory").write_bytes(bytes(size))
    module = "tests.support.parallel.all_reduce_ranks"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(tmp_path), str(rank), str(world), str(calls)],
            env=environment,
        )
        for rank in range(world)
    ]
    try:
        codes = [process.wait(120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0] * world
    digests = {(tmp_path / f"{rank}.digest").read_text() for rank in range(world)}
    assert len(digests) == 1
    residual, weight = all_reduce_ranks.start_of()
    wide = residual.double()
    for call in range(calls):
        rows = all_reduce_ranks.rows_of(call)
        wide[:rows] += sum(all_reduce_ranks.part_of(rank, call).double() for rank in range(world))
    found, out = torch.load(tmp_path / "0.pt")
    torch.testing.assert_close(found.double(), wide, rtol=1e-5, atol=1e-4)
    rows = all_reduce_ranks.rows_of(calls - 1)
    torch.testing.assert_close(
        out.double(), norm(found[:rows], weight, False), rtol=1e-5, atol=1e-5
    )
