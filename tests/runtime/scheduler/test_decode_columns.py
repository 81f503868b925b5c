"""Sequences that decode, in columns: what is kept of each is what one at a time would give."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.scheduler.batch import LAST, Batch
from runtime.scheduler.decode_columns import EMPTY, ONES, DecodeRows, RequestColumns
from runtime.scheduler.scheduler import scheduled_step
from tests.support.engine.bench import Bench, request
from tests.support.engine.fake_model import VOCAB_SIZE


def prompt(length: int, first: int = 1) -> list[int]:
    return [(first + place) % VOCAB_SIZE for place in range(length)]


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_pages_that_an_answer_fills_are_found_by_who_goes_on_from_it(
    prompt_len: int, overlap: bool
) -> None:
    bench = Bench(overlap=overlap, page_size=4, num_pages=30, max_model_len=60)
    bench.run(request(1, prompt(prompt_len), max_tokens=21))
    known = prompt(prompt_len) + bench.tokens(1)
    assert len(known) == prompt_len + 21
    # The last token was never computed: its cell of the page is not written.
    written = (len(known) - 1) // 4 * 4
    bench.run(request(2, [*known, 7, 7, 7, 7], max_tokens=1))
    assert next(output.cached for output in bench.of(2) if output.started) == written


def test_a_stop_token_of_one_row_ends_no_other_row() -> None:
    bench = Bench(page_size=4, num_pages=60, max_model_len=60)
    half = tuple(range(0, VOCAB_SIZE, 2))
    long = [request(id, prompt(4, first=id), max_tokens=20) for id in (1, 2)]
    bench.run(*long, request(3, prompt(6, first=40), max_tokens=20, stop_ids=half, min_tokens=9))
    for one in long:
        assert bench.tokens(one.id) == bench.plain(one) and bench.end(one.id).finish == "length"
    assert bench.end(3).finish == "stop"
    assert not bench.engine.requests.decoding._is_stop_id[:VOCAB_SIZE].any()


def test_an_id_that_is_used_again_gets_nothing_of_the_one_before() -> None:
    """The row of the first one is under way when the second one moves into its slot."""
    bench = Bench(overlap=True, page_size=4, num_pages=60, max_model_len=60, max_num_seqs=1)
    bench.add(request(1, prompt(3), max_tokens=20))
    bench.step(3)
    bench.engine.abort(1)
    again = request(1, prompt(5, first=50), max_tokens=5)
    bench.add(again)
    bench.run()
    outputs = bench.of(1)
    ends = [index for index, output in enumerate(outputs) if output.finish]
    assert len(ends) == 2
    tokens = [token for output in outputs[ends[0] + 1 :] for token in output.tokens]
    assert tokens == bench.plain(again)


def test_steps_of_all_sizes_share_the_columns_that_never_change() -> None:
    """One copy a size would be gigabytes for a server of many thousand rows."""

    table = Bench().engine.requests

    def step_of(count: int) -> Batch:
        column = np.arange(count)
        requests = RequestColumns(column, column, column, column)
        rows = DecodeRows(requests, column, ONES[:count], count, EMPTY, [])
        return scheduled_step(table, rows, None).batch

    few, more = step_of(3), step_of(5)
    assert more.tokens.tolist() == [LAST] * 5 and more.q_lens.tolist() == [1] * 5
    for name in ("q_lens", "tokens", "num_new_pages", "sample"):
        assert np.shares_memory(getattr(few, name), getattr(more, name)), name
