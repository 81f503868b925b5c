"""What a request's last RequestOutput says of its queueing, preemptions and steps."""

from __future__ import annotations

import pytest

from runtime.ipc.mailbox import merged
from runtime.messages import RequestOutput
from tests.support.engine.bench import Bench, request


def last(bench: Bench, id: int) -> RequestOutput:
    return next(output for output in bench.outputs if output.id == id and output.finish)


def prompt(length: int, first: int) -> list[int]:
    return [(first + position) % 90 for position in range(length)]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_alone_ran_in_batches_of_one(overlap: bool) -> None:
    bench = Bench(overlap=overlap)
    bench.run(request(1, prompt(4, 1), max_tokens=5))
    assert (last(bench, 1).mean_batch, last(bench, 1).preemptions) == (1.0, 0)


def test_the_mean_batch_counts_the_steps_from_the_first_to_the_last() -> None:
    bench = Bench(overlap=False)
    bench.add(request(1, prompt(4, 1), max_tokens=4))
    bench.step(2)  # alone
    bench.add(request(2, prompt(4, 40), max_tokens=4))
    bench.run()
    assert last(bench, 1).mean_batch == (1 + 1 + 2 + 2) / 4
    assert last(bench, 2).mean_batch == (2 + 2 + 1 + 1) / 4


def test_waiting_for_a_slot_is_no_part_of_the_mean() -> None:
    bench = Bench(overlap=False, max_num_seqs=2)
    bench.run(*(request(id, prompt(4, 20 * id), max_tokens=3) for id in (1, 2, 3)))
    assert [last(bench, id).mean_batch for id in (1, 2, 3)] == [2.0, 2.0, 1.0]


def test_preemptions_are_counted() -> None:
    bench = Bench(page_size=4, num_pages=6, max_model_len=20)
    bench.run(*(request(id, prompt(5, 20 * id), max_tokens=12) for id in (1, 2)))
    assert bench.engine.requests.num_preemptions >= 1
    told = [last(bench, id).preemptions for id in (1, 2)]
    assert sum(told) == bench.engine.requests.num_preemptions


def test_a_request_that_never_ran_has_an_empty_mean_batch() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add(request(1, prompt(4, 1), max_tokens=9), request(2, prompt(4, 30), max_tokens=9))
    bench.step(2)
    bench.engine.abort(2)
    bench.run()
    assert (last(bench, 2).finish, last(bench, 2).mean_batch) == ("abort", 0.0)


def test_what_the_last_output_tells_survives_a_slow_reader() -> None:
    both = merged(
        RequestOutput(1, [5]), RequestOutput(1, [6], finish="length", preemptions=2, mean_batch=3.5)
    )
    assert (both.preemptions, both.mean_batch) == (2, 3.5)
