"""Steps take sizes whose GEMMs fill the device's waves."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis.strategies as st
from hypothesis import given
from msgspec import structs

from benchmarks.schedule.host_step import fake_config
from benchmarks.shapes import FAMILIES
from model_zoo.config import read_config
from runtime.scheduler.chunked_prefill import (
    ChunkBudget,
    PrefillLoad,
    RequestMix,
)
from runtime.scheduler.step_time import StepLoad, StepTimes
from runtime.startup.engine_spec import FULL, TILE, full_wave_sizes, gemm_widths


@given(
    st.tuples(st.integers(1, 40_000), st.integers(1, 9000)),
    st.integers(1, 200),
    st.integers(0, 8192),
)
def test_no_size_leaves_more_processors_idle_than_is_said(
    widths: tuple[int, int], processors: int, most: int
) -> None:
    sizes = full_wave_sizes(widths, processors, most)
    assert list(sizes) == sorted(set(sizes)) and all(size <= most for size in sizes)
    for size in range(TILE, most + 1, TILE):
        tiles = [size // TILE * -(-width // TILE) for width in widths]
        places = [-(-count // processors) * processors for count in tiles]
        filled = [count >= FULL * most for count, most in zip(tiles, places, strict=True)]
        assert (size in sizes) == all(filled)


def test_the_inner_size_of_dense_layers_does_not_count_where_there_are_none(
    tmp_path: Path,
) -> None:
    """Of Qwen3-30B-A3B, whose config.json has one."""
    fields = FAMILIES["Qwen3-30B-A3B"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert fields["intermediate_size"] == 6144
    assert gemm_widths(read_config(tmp_path)) == ((32 + 2 * 4) * 128, 2048)


def learned(seconds_a_token: float) -> StepTimes:
    times = StepTimes()
    for tokens in (256, 512, 1024, 2048) * 20:
        times.record(StepLoad(0, tokens, 0, 0.0), tokens * seconds_a_token)
        times.record(StepLoad(100, 0, 100_000, 0.0), 100 * seconds_a_token)
    return times


SIZES = (512, 640, 1024, 1408, 2048)


@given(st.integers(1, 200), st.integers(10, 3000), st.integers(1, 60))
def test_steps_take_the_sizes_next_to_what_is_needed_in_turns(
    rows: int, ratio_percent: int, prompts: int
) -> None:
    """Their mean is what is needed, and above the smallest full-wave size all of them are such."""
    times, mix = learned(20e-6), RequestMix()
    mix.record(ratio_percent, 0, 100)
    config = structs.replace(fake_config(256, 40_000), device="cuda", full_wave_sizes=SIZES)
    plain = ChunkBudget(structs.replace(config, full_wave_sizes=()), times, mix)
    budget = ChunkBudget(config, times, mix)
    load = PrefillLoad(prompts, 1000 * prompts, 0, 0, 0)
    totals = [rows + budget.tokens(rows, 100 * rows, load) for _ in range(400)]
    needed = sum(plain.tokens(rows, 100 * rows, load) for _ in range(400)) / 400 + rows
    if SIZES[0] < needed < SIZES[-1]:
        assert all(total in SIZES or total % TILE == 0 or total == rows + 1000 for total in totals)
        assert abs(sum(totals) / 400 - needed) < TILE
    assert len(set(totals)) <= 3


def test_a_step_within_a_target_is_a_size_that_fills_the_device_and_ends_in_time() -> None:
    config = structs.replace(fake_config(256, 40_000), device="cuda", full_wave_sizes=(512, 1024))
    times, rows = learned(20e-6), 100

    def total(target_ms: float, waiting: int) -> int:
        budget = ChunkBudget(structs.replace(config, itl_target_ms=target_ms), times, RequestMix())
        return budget.tokens(rows, 10_000, PrefillLoad(4, waiting, 0, 0, 0)) + rows

    assert total(40.0, 3000) == 1024
    assert total(18.0, 3000) == 512
    assert total(40.0, 500) == 512
    assert total(8.0, 3000) == 384
