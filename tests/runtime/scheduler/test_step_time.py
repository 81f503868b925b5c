"""What is learned about the time of a step."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.scheduler.step_time import StepLoad, StepTimes


def linear_ms(load: StepLoad) -> float:
    """A device whose steps are exactly what StepTimes takes them for."""
    return (
        5.0
        + 0.01 * load.rows
        + 0.02 * load.prompt_tokens
        + 5e-5 * load.kv_tokens
        + 1e-6 * load.pairs
    )


def some_load(draw: random.Random) -> StepLoad:
    rows = draw.choice([0, 1, 8, 64, 200])
    tokens = draw.choice([0, 256, 700, 2048])
    return StepLoad(
        rows, tokens, rows * draw.randint(100, 4000), tokens * draw.uniform(100.0, 9000.0)
    )


def learned(draw: random.Random, *, steps: int = 200, strange: float = 0.0) -> StepTimes:
    times = StepTimes()
    for _ in range(steps):
        load = some_load(draw)
        factor = 8.0 if draw.random() < strange else 1.0
        times.record(load, factor * linear_ms(load) / 1000)
    return times


def test_nothing_is_claimed_before_a_prompt_was_run() -> None:
    times = StepTimes()
    times.record(StepLoad(8, 0, 4000, 0.0), 0.005)
    assert times.seconds(StepLoad(8, 0, 4000, 0.0)) is None
    assert times.prompt_tokens(8, 4000, 0, 0.02) is None


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_the_time_of_a_linear_device_is_learned_within_five_percent(seed: int) -> None:
    draw = random.Random(seed)
    times = learned(draw)
    for _ in range(20):
        load = some_load(draw)
        assert times.seconds(load) == pytest.approx(linear_ms(load) / 1000, rel=0.05)


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_as_many_prompt_tokens_fit_as_fill_the_time(seed: int) -> None:
    draw = random.Random(seed)
    times = learned(draw)
    rows, kv_tokens, context = draw.randint(1, 200), draw.randint(0, 100_000), draw.randint(0, 9000)
    fits = times.prompt_tokens(rows, kv_tokens, context, 0.04)
    assert fits is not None
    load = StepLoad(rows, fits, kv_tokens, fits * (context + fits / 2))
    assert times.seconds(load) == pytest.approx(0.04, rel=0.01)


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_one_strange_step_in_fifty_changes_little(seed: int) -> None:
    draw = random.Random(seed)
    times = learned(draw, steps=400, strange=0.02)
    load = StepLoad(64, 512, 64_000, 512 * 600.0)
    assert times.seconds(load) == pytest.approx(linear_ms(load) / 1000, rel=0.3)


@given(st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_a_step_that_was_read_late_makes_the_next_one_no_shorter(seed: int) -> None:
    draw, times = random.Random(seed), StepTimes()
    late = 0.0
    for step in range(400):
        load = some_load(draw)
        seconds = linear_ms(load) / 1000 - late
        late = draw.uniform(0.02, 0.1) if step > 50 and draw.random() < 0.03 and not late else 0.0
        times.seconds(load)
        times.record(load, max(seconds, 2e-5) + late)
    load = StepLoad(64, 512, 64_000, 512 * 600.0)
    assert times.seconds(load) == pytest.approx(linear_ms(load) / 1000, rel=0.5)
    assert times.per_token > 0.005 / 1000


def test_a_device_that_has_become_much_faster_is_believed() -> None:
    draw = random.Random(3)
    times = learned(draw)
    for _ in range(400):
        load = some_load(draw)
        times.record(load, linear_ms(load) / 10_000)
    load = StepLoad(64, 512, 64_000, 512 * 600.0)
    assert times.seconds(load) == pytest.approx(linear_ms(load) / 10_000, rel=0.15)


def image_load(draw: random.Random) -> StepLoad:
    load, stages = some_load(draw), draw.choice([0, 1, 4, 28])
    operations = stages * draw.choice([20.0, 200.0])
    return load._replace(
        encoder_stages=stages, encoder_operations=operations, has_images=draw.randint(0, 1)
    )


def image_ms(load: StepLoad) -> float:
    encoder = 0.1 * load.encoder_stages + 0.003 * load.encoder_operations
    return linear_ms(load) + encoder + 1.5 * load.has_images


def test_the_encoders_time_is_learned_beside_that_of_prompts() -> None:
    draw, times = random.Random(4), StepTimes()
    for _ in range(600):
        load = image_load(draw)
        times.record(load, image_ms(load) / 1000)
    for _ in range(50):
        load = image_load(draw)
        assert times.seconds(load) == pytest.approx(image_ms(load) / 1000, rel=0.1)
    assert times.encoder_tokens(28, 5600.0) == pytest.approx((2.8 + 16.8) / 0.02, rel=0.15)
    assert times.images_seconds == pytest.approx(0.0015, rel=0.3)


def test_the_encoder_costs_nothing_until_it_has_run_and_is_not_called_known() -> None:
    times = learned(random.Random(5))
    assert times.encoder_tokens(28, 5600.0) == 0 and not times.knows_encoder(0)
    assert times.images_seconds == 0


def test_steps_without_prompts_do_not_make_it_forget_what_a_prompt_costs() -> None:
    times = learned(random.Random(1))
    for _ in range(50_000):
        times.record(StepLoad(64, 0, 64_000, 0.0), 0.0088)
    load = StepLoad(64, 512, 64_000, 512 * 600.0)
    assert times.seconds(load) == pytest.approx(linear_ms(load) / 1000, rel=0.05)


def test_a_device_that_has_become_slower_is_believed_soon() -> None:
    draw = random.Random(2)
    times = learned(draw)
    load = StepLoad(64, 512, 64_000, 512 * 600.0)
    for _ in range(20):
        assert times.seconds(load) is not None
        times.record(load, 1.5 * linear_ms(load) / 1000)
    assert times.seconds(load) == pytest.approx(1.5 * linear_ms(load) / 1000, rel=0.15)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 9000)), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_history_makes_a_prompt_token_free_or_a_budget_negative(
    sizes: list[tuple[int, int]],
) -> None:
    times = StepTimes()
    for rows, tokens in sizes:
        times.record(StepLoad(rows, tokens, rows * 100, tokens * 50.0), 0.003)
    fits = times.prompt_tokens(10, 1000, 50, 0.02)
    assert fits is None or fits >= 0


def test_the_error_of_predictions_is_that_of_steps_not_seen_before() -> None:
    times = StepTimes()
    times.record(StepLoad(8, 512, 1000, 0.0), 0.020)
    assert times.num_predictions == 0
    for _ in range(50):
        times.seconds(StepLoad(8, 512, 1000, 0.0))
        times.record(StepLoad(8, 512, 1000, 0.0), 0.020)
    assert times.num_predictions > 0 and times.prediction_error / times.num_predictions < 0.02
    before = times.prediction_error
    times.record(StepLoad(8, 512, 1000, 0.0), 0.040)
    assert times.prediction_error - before == pytest.approx(1.0, rel=0.05)
