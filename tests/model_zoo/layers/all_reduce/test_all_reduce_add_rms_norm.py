"""The all-reduce with residual sum and norm: its arithmetic, its bits, its waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.layers.all_reduce.add_rms_norm import all_reduce_add_rms_norm, num_programs
from model_zoo.layers.all_reduce.add_rms_norm_quantize import all_reduce_add_rms_norm_quantize
from model_zoo.layers.all_reduce.symmetric_buffers import buffer_shape
from model_zoo.layers.quantized_gemm.quantize_rows import quantize_rows
from model_zoo.layers.quantized_rows import ScaleKind
from tests.support.parallel import all_reduce_ranks
from tests.support.parallel.group_of_buffers import deliver, group_of, random_parts
from tests.support.paths import ROOT

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [pytest.param(BF16, marks=pytest.mark.gpu), FP16, FP32]
DIGIT = {FP32: 2e-6, FP16: 2**-10, BF16: 2**-7}
EPS = 1e-5


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
    parts = random_parts(ranks, rows)
    deliver(ranks, 1, parts)
    residual = torch.randn(rows, size, device=device).to(dtype)
    weight = torch.randn(size, device=device).to(dtype)
    sums = [residual.clone() for _ in ranks]
    outs = [
        all_reduce_add_rms_norm(buffers, 1, part, total, weight, EPS)
        for buffers, part, total in zip(ranks, parts, sums, strict=True)
    ]
    exact = sum(part.double() for part in parts) + residual.double()
    torch.testing.assert_close(sums[0].double(), exact, rtol=0.51 * DIGIT[dtype], atol=1e-5)
    expected = norm(sums[0], weight, False)
    torch.testing.assert_close(outs[0].double(), expected, rtol=1.1 * DIGIT[dtype], atol=1e-6)
    for total, out in zip(sums, outs, strict=True):
        assert torch.equal(total, sums[0]) and torch.equal(out, outs[0])


def test_parts_are_added_in_the_order_of_the_ranks(device: str):
    ranks = group_of(3, 1, 64, FP32, device)
    parts = [torch.full((1, 64), value, device=device) for value in (1e8, 1.0, -1e8)]
    deliver(ranks, 0, parts)
    for buffers, part in zip(ranks, parts, strict=True):
        residual = torch.zeros(1, 64, device=device)
        all_reduce_add_rms_norm(buffers, 0, part, residual, residual[0] + 1, EPS)
        # 1e8 + 1 is 1e8 in float32; in another order a 1 would be left.
        assert not residual.any()


@pytest.mark.parametrize("plus_one", [False, True])
def test_the_sum_of_the_parts_may_be_normed_before_it_is_added(device: str, plus_one: bool):
    torch.manual_seed(3)
    ranks = group_of(2, 4, 96, FP32, device)
    parts = random_parts(ranks, 4)
    deliver(ranks, 0, parts)
    residual = torch.randn(4, 96, device=device)
    weight, post = (torch.randn(96, device=device) for _ in range(2))
    exact = residual.double() + norm(parts[0] + parts[1], post, plus_one)
    for buffers, part in zip(ranks, parts, strict=True):
        total = residual.clone()
        out = all_reduce_add_rms_norm(
            buffers, 0, part, total, weight, EPS, post_weight=post, plus_one=plus_one
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
    parts = random_parts(ranks, rows)
    deliver(ranks, 1, parts)
    residual = torch.randn(rows, 256, device=device, dtype=FP16)
    weight = torch.randn(256, device=device, dtype=FP16)
    plain, fused = residual.clone(), residual.clone()
    normed = all_reduce_add_rms_norm(ranks[0], 1, parts[0], plain, weight, EPS)
    expected = quantize_rows(normed, kind)
    found = all_reduce_add_rms_norm_quantize(ranks[1], 1, parts[1], fused, weight, EPS, kind)
    assert torch.equal(fused, plain)
    codes = [each.codes.view(torch.uint8)[:rows] for each in (found, expected)]
    assert torch.equal(*codes)
    assert not found.codes[rows:].float().any() or found.zeros is not None
    assert torch.equal(found.scales, expected.scales) and found.count == expected.count == rows
    if found.zeros is not None:
        assert torch.equal(found.zeros[:rows], expected.zeros[:rows])


@pytest.mark.parametrize("kind", [None, "row"])
def test_of_a_part_that_a_gemm_has_sent_nothing_is_sent_again(device: str, kind: ScaleKind | None):
    rows = 9
    ranks = group_of(2, rows, 256, FP16, device)
    parts = random_parts(ranks, rows)
    weight = torch.randn(256, device=device, dtype=FP16)
    results: list[list[Tensor]] = []
    for is_sent in (False, True):
        deliver(ranks, 1, parts)
        ranks[1].memory.fill_(-0.0)
        residual = torch.ones(rows, 256, device=device, dtype=FP16)
        arguments = ranks[0], 1, parts[0], residual, weight, EPS
        if kind is None:
            out = all_reduce_add_rms_norm(*arguments, is_sent=is_sent)
        else:
            codes = all_reduce_add_rms_norm_quantize(*arguments, kind, is_sent=is_sent)
            out = codes.codes.view(torch.uint8)
        results.append([residual, out])
        came = ranks[1].rows_of(1, 0, 1)[:rows]
        assert torch.equal(came, torch.zeros_like(came) if is_sent else parts[0])
        assert bool(torch.signbit(came).all()) == is_sent
    for plain, sent in zip(*results, strict=True):
        assert torch.equal(plain, sent)


def test_programs_have_a_row_each_where_no_other_rank_waits_for_them(device: str):
    buffers = group_of(2, 4000, 64, FP32, device)[0]
    assert num_programs(buffers, 4000, is_sent=True) == 4000
    assert num_programs(buffers, 4000, is_sent=False) == buffers.programs < 4000
    assert num_programs(buffers, 1, is_sent=False) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_has_been_added_is_forgotten_and_nothing_else(device: str, dtype: torch.dtype):
    ranks = group_of(3, 5, 96, dtype, device)
    parts = random_parts(ranks, 2)
    for turn in range(2):
        deliver(ranks, turn, parts)
    residual = torch.zeros(2, 96, dtype=dtype, device=device)
    all_reduce_add_rms_norm(ranks[1], 1, parts[1], residual, residual[0], EPS)
    memory = ranks[1].memory
    empty = torch.signbit(memory) & (memory == 0)
    assert empty[1].all() and empty[0, :, 2:].all()
    for other in (0, 2):
        assert torch.equal(ranks[1].rows_of(0, other, 1)[:2], parts[other])
        assert torch.equal(ranks[1].rows_of(1, 1, other)[:2], parts[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_of_both_signs_are_sent_and_added_as_zeros(device: str, dtype: torch.dtype):
    ranks = group_of(2, 3, 64, dtype, device)
    part = torch.zeros(3, 64, dtype=dtype, device=device)
    part[1], part[2, ::2] = -0.0, 5.0
    deliver(ranks, 0, [part + 0.0] * 2)
    for buffers in ranks:
        residual = torch.full((3, 64), -0.0, dtype=dtype, device=device)
        all_reduce_add_rms_norm(buffers, 0, part, residual, residual[0], EPS)
        assert torch.equal(residual, 2 * part)
    came = ranks[0].rows_of(0, 1, 0)
    assert torch.equal(came, part) and not torch.signbit(came).any()


def test_a_buffer_has_room_for_the_rows_of_every_other_rank(device: str):
    ranks = group_of(3, 5, 96, FP16, device)
    buffers = ranks[0]
    starts = [
        buffers.rows_of(turn, sender, receiver).data_ptr()
        for turn in range(2)
        for sender in range(3)
        for receiver in range(3)
        if sender != receiver
    ]
    assert len(set(starts)) == len(starts) == 12 and not any(start % 16 for start in starts)
    assert buffers.rows_of(0, 1, 2).shape == (5, 96)
    turn_at, slot = buffers.offsets(1)
    assert turn_at == 2 * slot == 2 * 5 * 96


def test_no_rows_launch_nothing(device: str):
    buffers = group_of(2, 5, 96, FP32, device)[0]
    empty = torch.empty(0, 96, device=device)
    # It would wait for another rank for ever.
    assert all_reduce_add_rms_norm(buffers, 0, empty, empty, torch.ones(96), EPS).shape == (0, 96)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the ranks are interpreted")
@pytest.mark.parametrize("world", [2, 3])
def test_processes_that_are_late_by_turns_get_the_same_bits_of_every_call(
    tmp_path: Path, world: int
):
    calls = 40
    shape = buffer_shape(all_reduce_ranks.MAX_ROWS, all_reduce_ranks.SIZE, world)
    empty = torch.full(shape, -0.0, dtype=all_reduce_ranks.DTYPE).numpy().tobytes()
    for rank in range(world):
        (tmp_path / f"{rank}.memory").write_bytes(empty)
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
