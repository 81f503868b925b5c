"""What the dashboard shows of the scheduler is what the scheduler has."""

from __future__ import annotations

from runtime.scheduler.kv_cache.page_pool import PagePool
from runtime.scheduler.snapshot import page_maps, running_states, step_samples, waiting_states
from runtime.scheduler.step_time import RECENT_STEPS, StepLoad, StepTimes
from runtime.snapshot import CACHED, FIRST_OWNER, FREE, SHARED, PageMap
from tests.support.engine.bench import Bench, request

FIRST, SECOND = FIRST_OWNER, FIRST_OWNER + 1


def kinds_of(found: PageMap) -> list[int]:
    """One entry a cell."""
    pairs = zip(found.runs[::2], found.runs[1::2], strict=True)
    return [kind for kind, count in pairs for _ in range(count)]


def prompt(length: int, *, first: int = 1) -> list[int]:
    return [(first + position) % 90 for position in range(length)]


def test_known_pages_give_the_known_map():
    pool = PagePool(8)
    first, second = pool.allocate(3), pool.allocate(2)  # 0 1 2, 3 4
    pool.cache_page(0, b"a" * 16)
    pool.cache_page(4, b"b" * 16)
    pool.share([0])
    second = [0, *second]
    gone = pool.allocate(1)  # 5
    pool.cache_page(5, b"c" * 16)
    pool.release(gone)
    found, groups = page_maps(pool, [first, second])
    assert groups == [], "there is one"
    assert kinds_of(found) == [SHARED, FIRST, FIRST, SECOND, SECOND, CACHED, FREE, FREE]
    assert (found.free, found.cached, found.shared, found.owned) == (2, 1, 1, 4)
    assert found.runs == [SHARED, 1, FIRST, 2, SECOND, 2, CACHED, 1, FREE, 2]


def test_each_group_of_layers_has_a_map_of_its_pages_with_content():
    pool = PagePool(10, num_groups=3)
    first = [*pool.allocate(2), *pool.allocate(1, 1)]  # 0 1, 2
    second = [*pool.allocate(1), *pool.allocate(2, 1)]  # 3, 4 5
    gone = pool.allocate(2, 1)  # 6 7
    pool.cache_page(gone[0], b"c" * 16, 1)
    pool.release(gone)
    found, groups = page_maps(pool, [first, second])
    expected = [FIRST, FIRST, FIRST, SECOND, SECOND, SECOND, CACHED, FREE, FREE, FREE]
    assert kinds_of(found) == expected
    assert [kinds_of(group) for group in groups] == [
        [FIRST, FIRST, SECOND],
        [FIRST, SECOND, SECOND, CACHED],
        [],
    ]
    assert [(one.owned, one.cached, one.free) for one in groups] == [(3, 0, 0), (3, 1, 0), (0,) * 3]
    # Cells of two pages, which end with their group.
    found, groups = page_maps(pool, [first, second], max_cells=5)
    assert {one.pages_per_cell for one in (found, *groups)} == {2}
    assert [len(kinds_of(one)) for one in groups] == [2, 2, 0]


def test_a_cell_of_several_pages_is_of_the_kind_of_most_of_them():
    pool = PagePool(10)
    first, second = pool.allocate(5), pool.allocate(2)
    found, _ = page_maps(pool, [first, second], max_cells=4)
    # Pages 0 to 2 are of the first, 3 and 4 too and 5 is not, 6 is of the second, 9 is alone.
    assert (found.pages_per_cell, kinds_of(found)) == (3, [FIRST, FIRST, FREE, FREE])
    assert (found.free, found.owned) == (3, 7)


def test_a_pool_that_no_sequence_uses_is_free():
    found, _ = page_maps(PagePool(5), [])
    assert (found.runs, found.free) == ([FREE, 5], 5)


def test_the_map_agrees_with_the_pool_while_requests_run():
    bench = Bench(num_pages=24, max_num_seqs=4)
    shared = prompt(8)
    bench.add(*(request(id, shared + prompt(id, first=40), max_tokens=9) for id in range(1, 7)))
    seen: set[int] = set()
    while not bench.engine.idle:
        bench.step()
        requests = bench.engine.requests
        sequences, states = running_states(requests)
        found, _ = page_maps(requests.pool, [one.pages.held() for one in sequences])
        assert found.shared + found.owned == requests.pool.num_used
        assert len(kinds_of(found)) == requests.pool.num_pages
        for place, state in enumerate(states):
            assert state.id == sequences[place].request_id
            owned = kinds_of(found).count(FIRST_OWNER + place)
            assert owned <= state.num_pages
        assert len(states) + len(waiting_states(requests)) == len(requests.live)
        seen |= set(kinds_of(found))
    assert {FREE, CACHED, SHARED, FIRST_OWNER} <= seen


def test_chunks_and_preemptions_are_events_of_a_sequence():
    bench = Bench(num_pages=8, max_num_seqs=4, max_batched_tokens=8)
    bench.add(
        request(1, prompt(12), max_tokens=16), request(2, prompt(10, first=50), max_tokens=16)
    )
    preempted = False
    while not bench.engine.idle:
        bench.step()
        for sequence in bench.engine.requests.live.values():
            sizes = [tokens for _, tokens in sequence.events]
            preempted = preempted or sizes.count(0) > 0
            assert sizes.count(0) == sequence.preemptions
            times = [at for at, _ in sequence.events]
            assert times == sorted(times)
    assert preempted
    for id, length in ((1, 12), (2, 10)):
        events = bench.end(id).events
        sizes = [tokens for _, tokens in events]
        first = sizes.index(0) if 0 in sizes else len(sizes)
        assert sum(sizes[:first]) == length and max(sizes) <= 8
        assert sizes.count(0) == bench.end(id).preemptions


def test_only_the_last_output_has_events():
    bench = Bench()
    bench.run(request(1, prompt(5)))
    *others, last = bench.of(1)
    assert [tokens for _, tokens in last.events] == [5]
    assert all(output.events == [] for output in others)


def test_the_last_steps_are_kept_and_their_parts_add_up():
    times = StepTimes()
    assert times.parts() == []
    for number in range(RECENT_STEPS + 5):
        times.record(StepLoad(number % 7, 64 * (number % 3), 100 * number, 50.0 * number), 0.01)
    samples = step_samples(times)
    assert len(samples) == RECENT_STEPS
    assert (samples[-1].kv_tokens, samples[-1].seconds) == (100 * (RECENT_STEPS + 4), 0.01)
    load = StepLoad(3, 128, 500, 2000.0)
    parts = [weight * count for weight, count in zip(times.parts(), (1, *load), strict=True)]
    assert abs(sum(parts) - (times.seconds(load) or 0.0)) < 1e-12
