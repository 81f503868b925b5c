"""Groups with a window give their pages back, and sequences go on from what is cached."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.engine.loop import Engine
from runtime.kv_capacity import KVCapacity
from runtime.messages import EngineRequest, SamplingParams
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from runtime.scheduler.kv_cache.page_pool import PagePool
from runtime.scheduler.kv_cache.prefix_hit import first_seen_page, longest_hit
from tests.support.engine.bench import Bench, request, resolved

VOCAB = 97


class PlainOutput:
    """Token 1 in each row that samples."""

    def __init__(self, batch: Batch) -> None:
        self._tokens = np.where(batch.sample, 1, -1).astype(np.int32)[:, None]

    def wait(self) -> ModelRunnerOutput:
        return ModelRunnerOutput(self._tokens)


class PlainExecutor:
    """Computes nothing; its results are read a step later, as a device's."""

    overlap = True

    def forward(self, batch: Batch) -> None:
        pass

    def prepare(self) -> bool:
        return False

    def sample(self, batch: Batch, masks: Masks | None = None) -> PlainOutput:
        return PlainOutput(batch)


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + place) % VOCAB for place in range(length)]


def test_sixteen_sequences_of_32k_tokens_take_a_fifth_of_the_kv_of_full_attention():
    """10 layers without a window and 52 with 1024: 32 heads, 16 KV heads of 128, in bfloat16."""
    page_bytes = 16 * 10 * 2 * 16 * 128 * 2  # of 10 layers
    limit, length, count = 52 * 10**9, 32768, 16
    full = 62 * 2 * 16 * 128 * 2 * length * count
    assert full > 5 * limit
    config = resolved(
        page_size=16, num_pages=limit // page_bytes, max_num_seqs=64, max_batched_tokens=8192,
        max_model_len=length, group_windows=(0, *(1024,) * 6), prefix_cache=False,
    )  # fmt: skip
    engine = Engine(config, VOCAB, PlainExecutor())
    params = SamplingParams(max_tokens=700, temperature=0)
    for id in range(count):
        engine.add(EngineRequest(id, 0, prompt(length - 700, first=id), params))
    most = 0
    while not engine.idle:
        engine.step()
        most = max(most, len(engine.requests.decoding.slots))
    assert most == count, "all decode at once"
    assert engine.requests.num_preemptions == 0 and engine.requests.pool.num_used == 0
    assert config.kv_capacity.held(length) * count * page_bytes <= limit


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("window", [1, 5, 16, 33])
def test_a_decoding_sequence_holds_no_more_than_its_capacity_says(
    window: int, page_size: int, drafts: int
):
    bench = Bench(
        page_size=page_size, num_pages=400, max_model_len=150, group_windows=(0, window),
        num_speculative_tokens=drafts,
    )  # fmt: skip
    bench.add(request(1, prompt(10), max_tokens=130))
    capacity, most = bench.config.kv_capacity, 0
    while not bench.engine.idle:
        bench.step()
        for one in bench.engine.requests.decoding.all():
            if len(one.tokens) == one.prompt_len:
                continue  # the chunk of its prompt is in flight
            held = len(one.pages.tables[1]) - one.pages.firsts[1]
            assert held <= capacity.decode_pages(window, 150)
            most = max(most, held)
    assert most >= min(window // page_size, 1), "some of the window is held"
    assert bench.tokens(1) == bench.plain(request(1, prompt(10), max_tokens=130))


def test_a_request_far_longer_than_the_pool_runs_if_all_layers_have_a_window():
    bench = Bench(
        page_size=4, num_pages=12, max_model_len=300, max_batched_tokens=8, group_windows=(9,)
    )
    one = request(1, prompt(200), max_tokens=90)
    bench.run(one)
    assert bench.tokens(1) == bench.plain(one)
    assert 12 * 4 < 200


def test_a_prompt_goes_on_from_the_last_window_before_the_cached_prefix():
    bench = Bench(
        page_size=4, num_pages=200, max_model_len=200, max_batched_tokens=64, group_windows=(0, 9)
    )
    shared = prompt(61)
    bench.run(request(1, [*shared, 5, 6], max_tokens=30))
    bench.run(request(2, [*shared, 7, 8, 9], max_tokens=30))
    assert bench.of(2)[0].cached == 60
    assert bench.tokens(2) == bench.plain(request(2, [*shared, 7, 8, 9], max_tokens=30))


def test_a_prefix_whose_window_is_gone_is_hit_up_to_an_older_one():
    windows, size = (0, 8), 4
    pool = PagePool(40, 2)
    hashes = [bytes([n]) * 16 for n in range(10)]
    full, window = pool.allocate(10, 0), pool.allocate(10, 1)
    for page, one in zip(full, hashes, strict=True):
        pool.cache_page(page, one, 0)
    for index in (2, 3, 4, 7, 9):
        pool.cache_page(window[index], hashes[index], 1)
    # A query at 40 sees positions 33 .. 39, of pages 8 and 9; one at 20 those of pages 3 and 4.
    assert longest_hit(pool, hashes, windows, size) == 5
    pool.cache_page(window[8], hashes[8], 1)
    assert longest_hit(pool, hashes, windows, size) == 10
    pool.evict([full[6]])
    assert longest_hit(pool, hashes, windows, size) == 5


@given(st.data())
def test_the_longest_hit_is_the_one_that_a_plain_search_finds(data: st.DataObject):
    windows = tuple(data.draw(st.lists(st.sampled_from([0, 1, 3, 8, 21]), min_size=1, max_size=3)))
    size, count = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(0, 14))
    hashes = [bytes([n]) * 16 for n in range(count)]
    pool = PagePool(count * len(windows) + 1, len(windows))
    cached = [{page for page in range(count) if data.draw(st.integers(0, 5))} for _ in windows]
    for group, pages in enumerate(cached):
        for page in pages:
            pool.cache_page(pool.allocate(1, group)[0], hashes[page], group)

    def serves(length: int) -> bool:
        return all(
            set(range(first_seen_page(length * size, window, size), length)) <= pages
            for window, pages in zip(windows, cached, strict=True)
        )

    wanted = max(length for length in range(count + 1) if serves(length))
    assert longest_hit(pool, hashes, windows, size) == wanted


def test_pages_in_use_are_counted_by_group():
    bench = Bench(page_size=4, num_pages=100, max_model_len=100, group_windows=(0, 8, 8))
    bench.add(request(1, prompt(40), max_tokens=20))
    bench.step(12)
    used = bench.engine.stats().group_pages_used
    assert sum(used) == bench.engine.stats().pages_used
    assert used[0] >= 10 and 2 <= used[1] <= 4 and used[1] == used[2]
    while not bench.engine.idle:
        bench.step()  # which compares the counts with the pages
    stats = bench.engine.stats()
    assert sum(stats.group_pages_used) == 0
    assert stats.group_pages_cached[0] == 14  # all full pages of 59 tokens
    assert 0 < stats.group_pages_cached[1] == stats.group_pages_cached[2]


@given(
    st.sampled_from([1, 4, 16]),
    st.lists(st.sampled_from([0, 1, 7, 64]), min_size=1, max_size=4),
    st.integers(0, 500),
    st.integers(1, 300),
)
def test_the_longest_request_is_the_longest_that_fits(
    page_size: int, windows: list[int], pages: int, most: int
):
    capacity = KVCapacity.of(page_size, tuple(windows), 1, 32)
    longest = capacity.longest(pages, most)
    assert capacity.needed(longest) <= pages
    assert longest == most or capacity.needed(longest + 1) > pages
    assert capacity.held(most) <= capacity.needed(most)
