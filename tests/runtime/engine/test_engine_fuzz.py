"""Random workloads against the strict fake model, and proof that it detects seeded bugs."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.engine.fuzz_workloads import FuzzWorkload, Play, workloads
from tests.support.examples import examples
from tests.support.mutations import decode_rows, kv_cache, requests, results, states


@examples(500, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(workloads())
def test_every_token_equals_plain_decoding_and_nothing_leaks(workload: FuzzWorkload) -> None:
    Play(workload).run()


MISTAKES = [
    *kv_cache.MISTAKES, *states.MISTAKES, *requests.MISTAKES, *decode_rows.MISTAKES,
    *results.MISTAKES,
]  # fmt: skip
# What takes longest to find: hundreds of workloads, or large ones.
SLOW = {
    requests.held_for_ever,
    requests.late_mask_not_waited_for,
    requests.left_out_row_committed,
    kv_cache.hit_of_a_page_not_yet_written,
    kv_cache.means_without_their_prefix,
    kv_cache.never_freed_behind_a_window,
    decode_rows.last_fed_stale_after_preemption,
    decode_rows.refused_of_a_row_that_started_over,
    states.snapshot_a_token_short,
    states.dropped_snapshot_lost,
    decode_rows.drafts_without_a_mask,
    decode_rows.one_page_a_step,
    kv_cache.page_named_before_its_last_token_is_computed,
    kv_cache.pages_of_another_group_hit,
    kv_cache.windows_begin_a_position_late,
    requests.back_at_once_after_making_way,
    results.stop_in_the_last_token_alone,
    results.tokens_after_the_end,
    states.snapshot_a_token_late,
    states.snapshot_never_loaded,
    states.snapshot_of_a_later_state,
    states.spare_state_of_another,
}


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
        kv_cache.TABLES[:] = [play.engine.requests]
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
