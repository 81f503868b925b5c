"""What the scheduler decides, seen in the batches that reach the executor."""

from __future__ import annotations

import sys

import pytest

from runtime.messages import BACKGROUND
from runtime.scheduler.batch import LAST
from tests.support.engine.bench import Bench, request


def order_of_ends(bench: Bench) -> list[int]:
    return [output.id for output in bench.outputs if output.finish]


def prompt(length: int, *, first: int = 1) -> list[int]:
    return [(first + position) % 90 for position in range(length)]


def test_lower_priority_numbers_run_first_and_equals_in_order_of_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    bench.run(
        request(1, prompt(4), priority=1),
        request(2, prompt(4), priority=0),
        request(3, prompt(4), priority=-5),
        request(4, prompt(4), priority=0),
    )
    assert order_of_ends(bench) == [3, 2, 4, 1]


def test_no_step_exceeds_the_token_budget_and_a_long_prompt_takes_several() -> None:
    bench = Bench(max_batched_tokens=10)
    bench.run(request(1, prompt(35), max_tokens=1))
    assert [batch.q_lens for batch in bench.batches] == [[10], [10], [10], [5]]
    assert [batch.sample for batch in bench.batches] == [[False]] * 3 + [[True]]
    assert [batch.starts for batch in bench.batches] == [[0], [10], [20], [30]]


def test_rows_that_decode_come_first_and_a_prompt_gets_what_is_left() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add(request(1, prompt(3), max_tokens=20), request(2, prompt(3, first=50), max_tokens=20))
    bench.step(2)
    bench.add(request(3, prompt(20, first=30)))
    bench.step()
    mixed = bench.batches[-1]
    assert (mixed.decode_rows, mixed.q_lens) == (2, [1, 1, 6])
    bench.run()


def test_decoding_goes_on_while_a_long_prompt_is_prefilled() -> None:
    bench = Bench(max_batched_tokens=8)
    bench.add(request(1, prompt(3), max_tokens=20))
    bench.step(2)
    bench.add(request(2, prompt(40, first=30)))
    bench.step(5)
    assert all(batch.decode_rows == 1 for batch in bench.batches[-5:])
    bench.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_that_decode_feed_the_token_that_the_device_remembers(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    bench.run(request(1, prompt(3), max_tokens=3))
    assert [batch.tokens for batch in bench.batches] == [prompt(3), [LAST], [LAST]]


def test_no_step_computes_the_last_token() -> None:
    bench = Bench(page_size=4, num_pages=2, max_model_len=9)
    one = request(1, prompt(5), max_tokens=4)  # 9 tokens, 8 of them in KV
    bench.run(one)
    assert bench.tokens(1) == bench.plain(one)
    assert len(bench.batches) == 4


def test_a_page_is_taken_only_when_a_row_reaches_it() -> None:
    bench = Bench(page_size=4)
    bench.run(request(1, prompt(3), max_tokens=7))
    assert [batch.num_new_pages for batch in bench.batches] == [[1], [0], [1], [0], [0], [0], [1]]


def test_a_full_cache_does_not_deadlock() -> None:
    bench = Bench(page_size=4, num_pages=6, max_model_len=24, max_num_seqs=8)
    requests = [request(i, prompt(6, first=i * 10), max_tokens=18) for i in range(6)]
    bench.run(*requests)
    assert bench.engine.stats().preemptions > 0
    assert all(bench.tokens(one.id) == bench.plain(one) for one in requests)


@pytest.mark.parametrize("overlap", [True, False])
def test_preempted_sequence_resumes_with_the_same_tokens(overlap: bool) -> None:
    bench = Bench(page_size=4, num_pages=6, max_model_len=24, overlap=overlap)
    old, young = (
        request(1, prompt(6), max_tokens=18),
        request(2, prompt(6, first=40), max_tokens=18),
    )
    bench.run(old, young)
    assert bench.engine.stats().preemptions == 1
    assert bench.tokens(1) == bench.plain(old)
    assert bench.tokens(2) == bench.plain(young)
    assert order_of_ends(bench) == [1, 2]


def test_the_newest_of_the_lowest_priority_is_preempted_first() -> None:
    bench = Bench(page_size=4, num_pages=9, max_model_len=36)
    bench.add(
        request(1, prompt(6), max_tokens=18, priority=1),
        request(2, prompt(6, first=40), max_tokens=18, priority=0),
        request(3, prompt(6, first=60), max_tokens=18, priority=1),
    )
    while not bench.engine.stats().preemptions:
        bench.step()
    decoding = bench.engine.requests.decoding
    assert {sequence.request_id for sequence in decoding.all()} == {1, 2}
    bench.run()
    assert order_of_ends(bench)[0] in (1, 2)


def test_a_preempted_sequence_comes_back_before_those_that_came_later() -> None:
    bench = Bench(page_size=4, num_pages=6, max_model_len=24)
    bench.add(*(request(i, prompt(6, first=i * 20), max_tokens=18) for i in (1, 2)))
    while not bench.engine.stats().preemptions:
        bench.step()
    bench.add(request(3, prompt(2)))
    head = bench.engine.requests.waiting.head()
    assert head is not None and head.request_id == 2
    bench.run()


def test_a_preempted_sequence_brings_its_seed_and_history_to_its_new_slot() -> None:
    bench = Bench(page_size=4, num_pages=6, max_model_len=24)
    young = request(2, prompt(6, first=40), max_tokens=18, frequency_penalty=0.5)
    bench.run(request(1, prompt(6), max_tokens=18), young)
    first, again = [
        new for batch in bench.batches for new in batch.new_rows if new.params == young.params
    ]
    assert first.seed == again.seed and first.prompt_len == again.prompt_len == 6
    assert first.history == young.tokens
    assert len(again.history) > 6
    assert again.history == (young.tokens + bench.plain(young))[: len(again.history)]


def test_history_is_sent_only_where_penalties_need_it() -> None:
    bench = Bench()
    bench.run(request(1, prompt(6)))
    assert bench.batches[0].new_rows[0].history == []


def test_a_requested_seed_is_kept_and_others_differ() -> None:
    bench = Bench()
    bench.run(*(request(i, prompt(4, first=i), seed=11 if i == 0 else None) for i in range(3)))
    seeds = [new.seed for new in bench.batches[0].new_rows]
    assert seeds[0] == 11 and len(set(seeds)) == 3


def test_a_prefix_that_was_computed_is_not_computed_again() -> None:
    bench = Bench(page_size=4)
    bench.run(request(1, prompt(11), max_tokens=2))
    bench.run(request(2, [*prompt(10), 95, 96], max_tokens=2))
    assert bench.of(2)[0].cached == 8
    assert bench.batches[-2].starts == [8] and bench.batches[-2].tokens == [9, 10, 95, 96]
    stats = bench.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (23, 8)


def test_a_prompt_of_whole_pages_computes_its_last_page_again() -> None:
    bench = Bench(page_size=4)
    bench.run(request(1, prompt(8)), request(2, prompt(8, first=50)))
    bench.run(request(3, prompt(8)))
    assert bench.of(3)[0].cached == 4
    assert bench.tokens(3) == bench.tokens(1)


def test_an_answer_is_a_prefix_for_the_next_turn() -> None:
    bench = Bench(page_size=4)
    bench.run(request(1, prompt(6), max_tokens=8))
    bench.run(request(2, [*prompt(6), *bench.tokens(1), 5]))
    assert bench.of(2)[0].cached == 12  # of 14 tokens, 13 of which are in KV


def test_cached_is_reported_in_the_first_output_alone() -> None:
    bench = Bench(page_size=4)
    bench.run(request(1, prompt(9)))
    bench.run(request(2, prompt(9)))
    assert [output.cached for output in bench.of(2)] == [8, 0, 0, 0]


def test_salts_share_no_pages() -> None:
    bench = Bench(page_size=4)
    bench.run(request(1, prompt(12), salt=b"a"))
    bench.run(request(2, prompt(12), salt=b"b"), request(3, prompt(12)))
    bench.run(request(4, prompt(12), salt=b"a"))
    assert [bench.of(id)[0].cached for id in (2, 3, 4)] == [0, 0, 8]


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    bench = Bench(page_size=4, prefix_cache=False)
    bench.run(request(1, prompt(12)))
    bench.run(request(2, prompt(12)))
    assert bench.of(2)[0].cached == 0


def test_a_prompt_that_wants_its_scores_is_computed_whole() -> None:
    bench = Bench(page_size=4, max_batched_tokens=5)
    bench.run(request(1, prompt(12)))
    bench.run(request(2, prompt(12), prompt_logprobs=0))
    first, *others = bench.of(2)
    assert first.cached == 0 and first.prompt_logprobs is not None
    assert [score is None for score in first.prompt_logprobs] == [True] + [False] * 11
    assert all(output.prompt_logprobs is None for output in others)


def test_a_step_does_no_more_work_however_many_wait() -> None:
    """Calls of functions are counted, of Python's and of C's: no clock is asked."""
    found: list[int] = []
    for waiting in (100, 5000):
        bench = Bench(max_num_seqs=4)
        bench.add(*(request(id, prompt(5, first=id % 40)) for id in range(waiting)))
        bench.engine.step()
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += 1

        sys.setprofile(count)
        try:
            bench.engine.step()
            bench.engine.stats()
        finally:
            sys.setprofile(None)
        found.append(calls)
    assert 0 < found[1] <= found[0] + 20, "a heap of fifty times the length is six levels deeper"


def test_those_who_wait_are_counted_without_those_who_left() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(*(request(i, prompt(4), max_tokens=30) for i in range(300)))
    bench.step()
    for i in range(1, 299):
        bench.engine.abort(i)
    bench.step()
    stats = bench.engine.stats()
    assert (stats.running, stats.waiting) == (1, 1)
    bench.run()
    assert bench.end(299).finish == "length"


@pytest.mark.parametrize("overlap", [True, False])
def test_work_in_the_background_makes_way_for_a_request_without_a_slot(overlap: bool) -> None:
    bench = Bench(max_num_seqs=2, overlap=overlap)
    idle = [
        request(id, prompt(6, first=id * 10), max_tokens=30, priority=BACKGROUND) for id in (1, 2)
    ]
    bench.add(*idle)
    bench.step(4)
    first = request(3, prompt(5, first=60), max_tokens=3)
    bench.add(first)
    bench.step(2)
    assert bench.engine.stats().waiting == 1
    bench.run()
    assert order_of_ends(bench)[0] == 3
    assert bench.engine.stats().preemptions == 1
    assert all(bench.tokens(one.id) == bench.plain(one) for one in [*idle, first])


@pytest.mark.parametrize("overlap", [True, False])
def test_work_in_the_background_makes_way_for_a_request_without_pages(overlap: bool) -> None:
    bench = Bench(page_size=4, num_pages=9, max_model_len=36, max_num_seqs=4, overlap=overlap)
    idle = [
        request(id, prompt(8, first=id * 10), max_tokens=12, priority=BACKGROUND)
        for id in (1, 2, 3)
    ]
    bench.add(*idle)
    bench.step(3)
    first = request(4, prompt(26, first=50), max_tokens=8)
    bench.run(first)
    assert order_of_ends(bench)[0] == 4
    assert bench.engine.stats().preemptions >= 2
    assert all(bench.tokens(one.id) == bench.plain(one) for one in [*idle, first])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("aborted", [True, False])
def test_work_in_the_background_stays_if_enough_pages_came_free(
    overlap: bool, aborted: bool
) -> None:
    bench = Bench(page_size=4, num_pages=12, max_model_len=36, overlap=overlap)
    idle = request(1, prompt(4), max_tokens=8, priority=BACKGROUND)
    answer = 20 if aborted else 2 if overlap else 3  # it ends in the step that refuses pages
    other = request(2, prompt(20, first=20), max_tokens=answer)
    bench.add(idle, other)
    bench.step(2)
    refused = request(3, prompt(24, first=50), max_tokens=4)
    bench.add(refused)
    bench.step()
    assert bench.engine.stats().waiting == 1
    if aborted:
        bench.engine.abort(2)
    bench.run()
    assert order_of_ends(bench)[0] == 2
    assert bench.engine.stats().preemptions == 0
    assert all(bench.tokens(one.id) == bench.plain(one) for one in [idle, refused])


@pytest.mark.parametrize("overlap", [True, False])
def test_work_in_the_background_makes_way_if_too_few_pages_came_free(overlap: bool) -> None:
    bench = Bench(page_size=4, num_pages=9, max_model_len=36, overlap=overlap)
    idle = request(1, prompt(14), max_tokens=14, priority=BACKGROUND)
    other = request(2, prompt(8, first=20), max_tokens=4)
    bench.add(idle, other)
    bench.step(2)
    refused = request(3, prompt(26, first=50), max_tokens=8)
    bench.run(refused)
    assert order_of_ends(bench) == [2, 3, 1]
    assert bench.engine.stats().preemptions == 1


def test_the_only_sequence_makes_way_if_it_is_in_the_background() -> None:
    bench = Bench(page_size=4, num_pages=4, max_model_len=16, max_num_seqs=1)
    idle = request(1, prompt(8), max_tokens=8, priority=BACKGROUND)
    bench.add(idle)
    bench.step(2)
    first = request(2, prompt(8, first=40), max_tokens=8)
    bench.run(first)
    assert order_of_ends(bench) == [2, 1]
    assert bench.tokens(1) == bench.plain(idle)


def test_nothing_makes_way_for_work_in_the_background_or_for_its_like() -> None:
    bench = Bench(max_num_seqs=1)
    for id, priority in ((1, BACKGROUND - 1), (2, -1), (3, BACKGROUND), (4, BACKGROUND)):
        bench.add(request(id, prompt(4, first=id), max_tokens=6, priority=priority))
        bench.step(2)
    bench.run()
    assert bench.engine.stats().preemptions == 0
    assert order_of_ends(bench) == [1, 2, 3, 4]


def test_the_tokens_of_an_aborted_answer_count_in_the_mix_of_requests() -> None:
    bench = Bench(page_size=16)
    bench.add(request(1, prompt(10), max_tokens=30))
    bench.step(6)
    generated = len(bench.tokens(1))
    bench.engine.abort(1)
    bench.run()
    assert generated == 5
    assert bench.engine.requests.mix.computed_per_generated(0) == 10 / generated
