"""Steps are cut to sizes whose GEMMs fill the device's waves, if those are nearly as large."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from msgspec import structs

from benchmarks.schedule.host_step import fake_config
from runtime.scheduler.chunked_prefill import (
    MAX_SIZE_RATIO,
    MIN_PREFILL_STEPS,
    MIN_SIZE_RATIO,
    ChunkBudget,
    PrefillLoad,
)
from runtime.scheduler.step_time import StepLoad, StepTimes
from runtime.startup.engine_spec import FULL, TILE, full_wave_sizes


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


def learned(seconds_a_token: float) -> StepTimes:
    times = StepTimes()
    for tokens in (256, 512, 1024, 2048) * 20:
        times.record(StepLoad(0, tokens, 0, 0.0), tokens * seconds_a_token)
        times.record(StepLoad(100, 0, 100_000, 0.0), 100 * seconds_a_token)
    return times


@given(st.integers(0, 200), st.integers(1, 30_000), st.sampled_from([(), (640,), (512, 1408)]))
def test_a_step_is_cut_to_a_size_that_fills_only_if_that_is_nearly_as_large(
    rows: int, waiting: int, sizes: tuple[int, ...]
) -> None:
    config = structs.replace(fake_config(256, 40_000), device="cuda")
    times, prompts = learned(20e-6), PrefillLoad(8, waiting, 0)
    free = ChunkBudget(config, times).tokens(rows, 100 * rows, prompts) + rows
    cut = ChunkBudget(structs.replace(config, full_wave_sizes=sizes), times)
    total = cut.tokens(rows, 100 * rows, prompts) + rows
    assert total == free or (
        total in sizes and MIN_SIZE_RATIO * free <= total <= MAX_SIZE_RATIO * free
    )
    near = [size for size in sizes if max(rows + 256, MIN_SIZE_RATIO * free) <= size <= free]
    assert not near or total in sizes


def test_a_step_grows_to_a_size_that_fills_only_if_enough_waits_and_it_ends_in_time() -> None:
    config = structs.replace(fake_config(256, 40_000), device="cuda", full_wave_sizes=(512, 1024))
    times, rows, each = learned(20e-6), 100, 700  # prompt tokens of each of MIN_PREFILL_STEPS steps

    def total(target_ms: float, waiting: int) -> int:
        budget = ChunkBudget(structs.replace(config, itl_target_ms=target_ms), times)
        return budget.tokens(rows, 10_000, PrefillLoad(4, waiting, 0)) + rows

    assert total(40.0, MIN_PREFILL_STEPS * each) == 1024
    assert total(18.0, MIN_PREFILL_STEPS * each) < 1024
    assert total(40.0, each) < rows + each
