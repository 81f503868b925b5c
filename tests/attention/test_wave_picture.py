"""The picture of a split plan: what the planners made, with the makespans of the simulation."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from attention.backend import BackendChoice, Shape
from attention.planner.queued_plans import plan_fa3
from attention.planner.simulation import makespan, program_loads, work_tile_blocks
from attention.planner.split_plan import EIGHTHS, SplitPlanSpec
from attention.wave_picture import PLANNERS, PicturedDevice

CPU = torch.device("cpu")
MHA = BackendChoice("mha")


def shape(heads: int = 32, kv_heads: int = 8, head_dim: int = 128) -> Shape:
    return Shape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=16,
        dtype=torch.float32,
        kv_dtype=torch.float32,
    )


def longest(programs: list[list[tuple[int, int]]]) -> float:
    return max(sum(cost for _, cost in program) for program in programs) / EIGHTHS


@pytest.mark.parametrize("planner", sorted(PLANNERS))
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("rows", [0, 1, 7, 40, 200])
def test_the_longest_program_ends_at_the_makespan(planner: str, kv_heads: int, rows: int):
    spec = SplitPlanSpec(kv_heads=kv_heads, programs=132, work_tile_cost=3)
    numbers = random.Random(rows)
    cache_seqlens = np.array([numbers.randint(1, 9000) for _ in range(rows)], dtype=np.int32)
    plan = PLANNERS[planner](np.arange(rows + 1, dtype=np.int32), cache_seqlens, spec)
    programs = program_loads(plan, spec)
    assert longest(programs) == makespan(plan, spec)
    # All blocks of each row and head are read once.
    read = np.zeros(rows, dtype=np.int64)
    for program in programs:
        for row, cost in program:
            read[row] += cost
    due = np.zeros(rows, dtype=np.int64)
    np.add.at(due, plan.work[:, 0], work_tile_blocks(plan, spec) * EIGHTHS + spec.work_tile_cost)
    assert read.tolist() == due.tolist()


def test_flash_attention_3_makes_a_second_wave_of_the_published_example():
    """32 rows of 24 blocks on 78 SMs: 3 parts of 8 blocks each are 18 more than there are SMs."""
    spec = SplitPlanSpec(kv_heads=1, programs=78, block=176, work_tile_cost=0, merge_cost=0)
    plan = plan_fa3(np.arange(33, dtype=np.int32), np.full(32, 4096, dtype=np.int32), spec)
    programs = program_loads(plan, spec)
    loads = sorted(sum(cost for _, cost in program) // EIGHTHS for program in programs)
    assert loads == [8] * 60 + [16] * 18


def test_a_cpu_gets_the_plan_of_an_h100():
    device = PicturedDevice.of(CPU, MHA, shape())
    assert device is not None
    assert (device.runs_here, device.sms, device.planner) == (False, 132, "stream-k")
    few, many = device.picture([4096] * 4), device.picture([4096] * 40)
    assert (few.spec.programs, many.spec.programs) == (132, 264)
    for picture in (few, many):
        assert picture.plan.makespan == longest(picture.plan.programs)
        assert picture.lower_bound <= min(picture.plan.makespan, picture.fa3.makespan)
        assert len(picture.plan.programs) == len(picture.fa3.programs) == picture.spec.programs
    # 40 rows of 64 blocks: half a block more or less on each of 264 programs.
    assert many.plan.makespan < many.fa3.makespan


def test_a_block_takes_as_long_as_the_memory_needs_for_it():
    device = PicturedDevice.of(CPU, MHA, shape())
    assert device is not None
    spec = device.specs[1]
    bytes_of_wave = 2 * spec.block * 128 * 2 * spec.programs
    assert device.block_us(spec) == pytest.approx(bytes_of_wave / 3.052e6)


def test_a_shape_that_the_kernel_does_not_serve_has_no_picture():
    assert PicturedDevice.of(CPU, MHA, shape(head_dim=20)) is None


def test_no_triton_is_needed():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\nfrom attention.backend import BackendChoice, Shape\n"
        "from attention.wave_picture import PicturedDevice\n"
        "s = Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, dtype=torch.bfloat16, "
        "kv_dtype=torch.bfloat16)\n"
        "d = PicturedDevice.of(torch.device('cpu'), BackendChoice('mha'), s)\n"
        "assert d.picture([100, 2000]).plan.makespan > 0"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
