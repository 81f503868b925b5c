"""How many prompt tokens a step takes, by what has been learned of steps and of requests."""

from __future__ import annotations

import pytest
from msgspec import structs

from benchmarks.schedule.host_step import fake_config
from runtime.scheduler.chunked_prefill import (
    FIRST_TOKEN_WEIGHT,
    GPU,
    HEADROOM,
    ChunkBudget,
    PrefillLoad,
    RequestMix,
)
from runtime.scheduler.step_time import StepLoad, StepTimes


def budget_of(
    times: StepTimes, *, target_ms: float = 0.0, mix: tuple[int, int] = (0, 0)
) -> ChunkBudget:
    """A budget on a GPU; `mix`: tokens computed and generated for the requests so far."""
    seen = RequestMix()
    seen.record(mix[0], 0, mix[1])
    config = structs.replace(fake_config(256, 9000), device="cuda", itl_target_ms=target_ms)
    return ChunkBudget(config, times, seen)


def learned(decode_ms: float, token_us: float) -> StepTimes:
    """Times of a device on which decode rows take `decode_ms`, however many."""
    times = StepTimes()
    for tokens in (256, 512, 1024, 2048) * 20:
        times.record(StepLoad(100, tokens, 1, 0.0), decode_ms / 1e3 + tokens * token_us / 1e6)
        times.record(StepLoad(100, 0, 1, 0.0), decode_ms / 1e3)
        times.record(StepLoad(10, 0, 1, 0.0), decode_ms / 1e3)
    return times


def mean_tokens(budget: ChunkBudget, rows: int, load: PrefillLoad, steps: int = 200) -> float:
    return sum(budget.tokens(rows, 1, load) for _ in range(steps)) / steps


def test_the_first_chunk_beside_rows_that_decode_is_a_small_one() -> None:
    budget = budget_of(StepTimes())
    assert budget.tokens(10, 1000, PrefillLoad(1, 100_000, 0, 0, 0)) <= 4 * GPU.min_prefill_tokens


@pytest.mark.parametrize("ratio", [1, 4, 10])
def test_prompts_are_computed_as_fast_as_answers_bring_new_ones(ratio: int) -> None:
    """Rows that end bring `ratio` prompt tokens for each of their tokens."""
    budget = budget_of(learned(20.0, 20.0), mix=(1000 * ratio, 1000))
    tokens = mean_tokens(budget, 100, PrefillLoad(1, 2000, 0, 0, 0))
    flow = HEADROOM * 100 * ratio
    assert 0.99 * flow <= tokens < flow + 150  # what rounding still carries is not in the mean


def test_the_queue_is_worked_off_with_the_least_waiting_of_all() -> None:
    """The mean of the steps minimizes the cost of the docs, found here by trying all sizes."""
    decode, token, rows, prompts, waiting = 0.020, 20e-6, 60, 100, 100_000
    budget = budget_of(learned(1e3 * decode, 1e6 * token))

    def cost(tokens: int) -> float:
        step = decode + tokens * token
        queue = (prompts + 1) / 2 * waiting / tokens * step
        return rows * step + queue / FIRST_TOKEN_WEIGHT

    best = min(range(128, 8192), key=cost)
    tokens = mean_tokens(budget, rows, PrefillLoad(prompts, waiting, 0, 0, 0))
    assert abs(tokens - best) < 0.05 * best


def echo(rows_computed: int, waiting: int, answer: int = 250) -> tuple[ChunkBudget, PrefillLoad]:
    """80 rows, and prompts of 1,000 tokens that wait; requests so far were of 1000/`answer`."""
    budget = budget_of(learned(10.0, 20.0), mix=(1000, answer))
    budget._mix.count_row(rows_computed, 0)  # pyright: ignore[reportPrivateUsage]
    return budget, PrefillLoad(waiting // 1000, waiting, 0, 0, rows_computed)


def test_a_queue_that_answers_ending_together_made_is_not_computed_as_one_group_again() -> None:
    """flow is 400 and drain 506: together 645, where all 120 requests spread evenly take 600."""
    budget, load = echo(80_000, 40_000)
    even = HEADROOM * 120_000 / 250
    assert mean_tokens(budget, 80, load) == pytest.approx(even, rel=0.03)
    both = (400**2 + 506**2) ** 0.5  # what the prompts have computed comes back, too
    tokens = mean_tokens(budget, 80, load._replace(num_computed=40_000))
    assert tokens == pytest.approx(both, rel=0.03)


def test_a_queue_of_more_than_the_even_steps_is_drained_as_if_nothing_else_came() -> None:
    """flow is 400 and drain 1,256; all 180 requests spread evenly would take 900."""
    budget, load = echo(80_000, 100_000)
    drain = (101 / 2 * 100_000 * 0.010 / (20e-6 * 80 * FIRST_TOKEN_WEIGHT)) ** 0.5
    assert mean_tokens(budget, 80, load) == pytest.approx(drain, rel=0.03)


def test_steps_are_not_smaller_than_the_flow_where_the_rows_have_shorter_prompts() -> None:
    budget, load = echo(8_000, 2_000)
    assert mean_tokens(budget, 80, load) >= HEADROOM * 80 * 1000 / 250


def test_a_target_that_decode_rows_alone_exceed_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    load = PrefillLoad(1, 2000, 0, 0, 0)
    kept = budget_of(learned(20.0, 20.0), target_ms=30.0)
    missed = budget_of(learned(20.0, 20.0), target_ms=15.0)
    for _ in range(3):
        assert kept.tokens(100, 1, load) > 0
    assert not caplog.records
    for _ in range(3):
        assert missed.tokens(100, 1, load) >= GPU.min_prefill_tokens  # the prompt goes on
    [record] = caplog.records
    assert "--itl-target-ms 15 cannot be kept: 100 decode rows" in record.getMessage()


def test_cached_prompt_tokens_do_not_count_as_computed() -> None:
    mix = RequestMix()
    assert (mix.computed_per_generated(0), mix.computed_share) == (0.0, 1.0)
    for _ in range(1000):
        mix.record(30_000, 29_700, 200)
    mix.count_row(0, 0)
    assert mix.computed_per_generated(0) == pytest.approx(1.5)
    assert mix.computed_share == pytest.approx(0.01)
    for _ in range(3000):
        mix.record(1000, 0, 100)
    assert mix.computed_per_generated(0) == pytest.approx(10.0, rel=0.01)


def test_rows_with_long_answers_show_that_the_mix_has_changed_before_they_end() -> None:
    mix = RequestMix()
    for _ in range(1000):
        mix.record(6000, 0, 2)
    before = mix.computed_per_generated(0)
    for _ in range(32):
        mix.count_row(500, 0)
    assert mix.computed_per_generated(32 * 500) == before == pytest.approx(3000)
    assert mix.computed_per_generated(32 * (500 + 1000)) < 60
    for _ in range(32):
        mix.count_row(500, 0, -1)
    assert mix.computed_per_generated(0) == before
