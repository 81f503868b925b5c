"""Random workloads against the strict fake model, and proof that it detects seeded bugs."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.engine.fuzz_mutations import (
    MISTAKES,
    TABLES,
    dropped_snapshot_lost,
    held_for_ever,
    hit_of_a_page_not_yet_written,
    last_fed_stale_after_preemption,
    late_mask_not_waited_for,
    left_out_row_committed,
    means_without_their_prefix,
    refused_of_a_row_that_started_over,
    snapshot_a_token_short,
)
from tests.support.engine.fuzz_workloads import FuzzWorkload, Play, workloads
from tests.support.examples import examples


@examples(500, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(workloads())
def test_every_token_equals_plain_decoding_and_nothing_leaks(workload: FuzzWorkload) -> None:
    Play(workload).run()


# What takes longest to find: hundreds of workloads.
SLOW = {held_for_ever, hit_of_a_page_not_yet_written, left_out_row_committed}
SLOW |= {means_without_their_prefix, late_mask_not_waited_for, last_fed_stale_after_preemption}
SLOW |= {refused_of_a_row_that_started_over, snapshot_a_token_short, dropped_snapshot_lost}


@pytest.mark.parametrize(
    ("owner", "name", "mistake"),
    [pytest.param(*m, marks=pytest.mark.slow if m[2] in SLOW else ()) for m in MISTAKES],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_oracle_sees_a_mistake(
    owner: object,
    name: str,
    mistake: Callable[..., Callable[..., object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, mistake(getattr(owner, name)))

    def fails(workload: FuzzWorkload) -> bool:
        play = Play(workload)
        TABLES[:] = [play.engine.requests]
        try:
            play.run()
        except Exception:
            return True
        return False

    only_search = settings(
        max_examples=5000,  # the rarest takes hundreds; which are tried moves with the code
        phases=[Phase.generate],
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    hypothesis.find(workloads(), fails, settings=only_search)
