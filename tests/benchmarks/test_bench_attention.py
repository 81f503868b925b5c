"""bench_attention without a GPU: its cases, its figures, and a run with a clock that is not one."""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

from benchmarks.attention.bench_attention import parse_options, run_grids, subjects_of
from benchmarks.attention.cases import MIB, AttentionCase
from benchmarks.attention.grids import GRIDS, cases_of, equal
from benchmarks.attention.inputs import COLD_BYTES, RandomPool, make_inputs, num_sets
from benchmarks.attention.measure import measure
from benchmarks.attention.results import FA3, FA3_PLAN, OURS, PLAIN, CaseResult, SubjectOutcome
from benchmarks.attention.subjects import Prepared, back_end, kernels
from benchmarks.attention.targets import TargetResult, predictions, verdicts
from benchmarks.attention.timing import Bandwidth, Sample, TimedGraph

READ = Bandwidth(read=3.0, copy=2.9)


class OneMicrosecond:
    """Calls once and says that it took 1 us."""

    def capture(self, call: Callable[[int], object], num_sets: int) -> TimedGraph:
        call(num_sets - 1)
        return TimedGraph(None, 1, call)  # type: ignore[arg-type]

    def replay(self, captured: Sequence[TimedGraph]) -> list[Sample]:
        return [Sample(1.0, 1.0, 1.0) for _ in captured]


def tiny(*lens: int, q_lens: tuple[int, ...] = (), **more: object) -> AttentionCase:
    return AttentionCase(
        "tiny", q_lens or (1,) * len(lens), lens, 4, 2, head_dim=16, grid="decode", **more
    )  # type: ignore[arg-type]


@pytest.fixture
def pool() -> RandomPool:
    return RandomPool(torch.device("cpu"), cold_bytes=1 << 15)


def test_the_decode_grid_is_every_batch_length_and_layout_of_heads():
    cases = cases_of(["decode"])
    assert len({(case.heads, case.rows, case.kv_lens[0]) for case in cases}) == 16 * 3 * 2
    assert {len(set(case.kv_lens)) for case in cases} == {1}


@pytest.mark.parametrize("grid", GRIDS)
def test_cases_of_a_grid_have_different_names_and_feed_what_they_hold(grid: str):
    cases = cases_of([grid])
    names = {(case.heads_name, case.name, case.warm) for case in cases}
    assert len(names) == len(cases)
    for case in cases:
        assert all(0 < q <= kv for q, kv in zip(case.q_lens, case.kv_lens, strict=True))
    assert len(set(cases_of([grid], 6))) == 6


def test_bytes_are_those_of_the_keys_and_values_that_are_seen():
    assert equal(32, 4096, (8, 1), grid="decode").kv_bytes == 64 * MIB
    assert equal(2, 4096, (8, 1), grid="decode", kv_dtype="fp8").kv_bytes == 2 * MIB
    assert equal(1, 4096, (8, 1), grid="decode", window=128).kv_bytes == 128 * 2 * 128 * 2


def test_operations_are_those_of_the_pairs_that_see_each_other():
    pairs = {
        tiny(3, q_lens=(3,)): 1 + 2 + 3,
        tiny(10, q_lens=(3,)): 8 + 9 + 10,
        tiny(10, 4, q_lens=(3, 1), window=4): 4 + 4 + 4 + 4,
    }
    for case, count in pairs.items():
        assert case.flops == 4 * case.heads * case.head_dim * count


def test_cold_sets_together_are_far_larger_than_a_cache():
    for case in cases_of(["decode", "b1", "small"]):
        sets = num_sets(case)
        assert sets == 1 if case.warm else sets * case.kv_bytes >= COLD_BYTES


def test_sets_share_no_page_and_rows_hold_all_of_them(pool: RandomPool):
    case = tiny(33, 16, 1)
    pool.reserve([case])
    inputs = make_inputs(case, pool)
    assert inputs.sets > 1
    used = [table[row, :pages] for table in inputs.tables for row, pages in enumerate((3, 1, 1))]
    pages = torch.cat(used).tolist()
    assert sorted(pages) == list(range(inputs.sets * case.pages)) == list(range(len(inputs.k)))


def test_a_case_that_the_pool_cannot_hold_is_a_row_with_its_reason(pool: RandomPool):
    pool.reserve([tiny(16)])
    row = measure(tiny(1 << 16), {OURS: kernels("stream-k")}, pool, OneMicrosecond())
    assert "the pool has" in row.outcomes[OURS].error and row.us(OURS) is None


def test_a_subject_that_fails_does_not_take_the_others_along(pool: RandomPool):
    def broken(_: object) -> Prepared:
        raise RuntimeError("no such kernel\nat all")

    case = tiny(40, 17)
    pool.reserve([case])
    row = measure(case, {FA3: broken, "mha": back_end("mha")}, pool, OneMicrosecond())
    assert row.outcomes[FA3].error == "RuntimeError: no such kernel"
    assert row.us("mha") == 1.0


def test_what_a_graph_reads_lives_until_it_is_replayed(pool: RandomPool):
    class Replayed(OneMicrosecond):
        def replay(self, captured: Sequence[TimedGraph]) -> list[Sample]:
            assert [plan() is None for plan in plans] == [False] * len(captured)
            return super().replay(captured)

    def planned(inputs: object) -> Prepared:
        plan = torch.zeros(1)
        plans.append(weakref.ref(plan))
        return Prepared(lambda _: plan, None)

    plans: list[weakref.ref[torch.Tensor]] = []
    pool.reserve([tiny(16)])
    row = measure(tiny(16), {name: planned for name in (OURS, PLAIN, FA3)}, pool, Replayed())
    assert len(plans) == 3 and row.us(FA3) == 1.0


def test_a_wrong_result_has_no_time(pool: RandomPool):
    def nonsense(inputs: object) -> Prepared:
        prepared = back_end("mha")(inputs)  # type: ignore[arg-type]
        assert prepared.result is not None
        wrong = prepared.result() * 1.1
        return Prepared(lambda _: wrong, lambda: wrong)

    case = tiny(40, 17)
    pool.reserve([case])
    row = measure(case, {"mha": back_end("mha"), FA3: nonsense}, pool, OneMicrosecond())
    assert row.us("mha") == 1.0 and row.us(FA3) is None
    assert row.outcomes[FA3].wrong


def test_kernels_with_every_plan_agree_with_plain_attention(pool: RandomPool):
    case = tiny(70, 5, 40, q_lens=(1, 1, 20))
    pool.reserve([case])
    subjects = {
        "mha": back_end("mha"),
        OURS: kernels("stream-k"),
        PLAIN: kernels("stream-k", plain=True),
        FA3_PLAN: kernels("fa3", plain=True),
    }
    row = measure(case, subjects, pool, OneMicrosecond())
    assert all(row.us(name) == 1.0 for name in subjects), row.outcomes
    assert row.outcomes[OURS].predicted_us > 0


def row_of(case: AttentionCase, **us: float) -> CaseResult:
    return CaseResult(
        case, {name.replace("_", " "): SubjectOutcome(us=value) for name, value in us.items()}
    )


def found(rows: list[CaseResult], start: str) -> TargetResult:
    return next(v for v in verdicts(rows, READ, {}) if v.target.startswith(start))


def test_targets_say_met_missed_or_not_measured():
    case = equal(48, 4096, (8, 1), grid="decode")
    assert found([], "FlashAttention-3's time over ours, every").met is None
    fast = row_of(case, ours=30.0, FA3=53.0)
    assert found([fast], "FlashAttention-3's time over ours at second waves").met
    slow = row_of(case, ours=45.0, FA3=53.0, plain=46.0, fa3_plan=44.0)
    verdict = found([fast, slow], "FlashAttention-3's time over ours at second waves")
    assert verdict.met is False and "1 of 2, worst 1.18 (8/1 48 x 4k)" in verdict.found
    assert found([slow], "same (plain) kernel, the plan of `fa3` over ours, every").met is False
    assert found([slow], "decode >= 80%").met is False
    assert found([row_of(case, ours=40.0)], "decode >= 80%").met


def test_a_mixed_step_is_compared_with_the_sum_of_its_parts():
    decode, prompt, whole = cases_of(["mixed"], 2)
    rows = [row_of(decode, ours=3.0), row_of(prompt, ours=4.0), row_of(whole, ours=7.5)]
    assert found(rows, "mixed steps (ours)").met is False
    rows[2] = row_of(whole, ours=6.9)
    assert found(rows, "mixed steps (ours)").met


def test_predictions_say_how_far_off_they_are_and_whether_the_best_plan_was_found():
    def timed(rows: int, **predicted_and_us: tuple[float, float]) -> CaseResult:
        outcomes = {
            name.replace("_", " "): SubjectOutcome(us=us, predicted_us=predicted)
            for name, (predicted, us) in predicted_and_us.items()
        }
        return CaseResult(equal(rows, 4096, (8, 1), grid="decode"), outcomes)

    rows = [
        timed(1, plain=(5, 10), greedy_plan=(6, 12), fa3_plan=(7, 14)),
        timed(2, plain=(10, 20), greedy_plan=(9, 21), fa3_plan=(14, 28)),
        timed(3, plain=(20, 40), greedy_plan=(24, 48), fa3_plan=(28, 56)),
    ]
    lines = list(predictions(rows))
    assert (
        "plain: geometric mean 0.500, 0.50 to 0.50, correlation of logarithms 1.0000, 3" in lines[0]
    )
    assert lines[-1].endswith("in 2 of 3 cases")


def test_a_run_prints_each_case_and_its_results_become_json(
    pool: RandomPool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    options = parse_options(["--grid", "decode", "--planner", "stream-k,fa3"])
    assert list(subjects_of("decode", options)) == [OURS, PLAIN, FA3_PLAN]
    monkeypatch.setattr(
        "benchmarks.attention.bench_attention.selected_cases", lambda *_: [tiny(40, 17)]
    )
    pool.reserve([tiny(40, 17)])
    rows = run_grids(options, pool, OneMicrosecond(), READ)
    assert "4/2 tiny" in capsys.readouterr().out
    found = rows[0].to_json()
    assert found["subjects"][OURS]["us"] == 1.0 and found["case"]["kv_len_max"] == 40


def test_unknown_grids_are_refused_by_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_options(["--grid", "decode,wide"])
    assert "unknown wide" in capsys.readouterr().err
    assert isinstance(parse_options([]), argparse.Namespace)
