"""Where a model with recurrent states finds a prefix again, and where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from runtime.messages import BACKGROUND, EngineRequest
from runtime.scheduler.sequence import Sequence
from tests.support.engine.bench import Bench, request

PAGE = 4


def bench(**changed: Any) -> Bench:
    config: dict[str, Any] = {
        "page_size": PAGE, "num_pages": 64, "max_num_seqs": 4, "max_batched_tokens": 32,
        "max_model_len": 64, "num_states": 5, "num_snapshots": 8, "snapshot_every": 8,
    }  # fmt: skip
    return Bench(**config | changed)


def prompt(length: int, first: int = 3) -> list[int]:
    return [(first + 7 * place) % 90 for place in range(length)]


def run(bench: Bench, *requests: EngineRequest) -> list[int]:
    """-> of each request, how many tokens of its prompt were found; all answers are right."""
    bench.run(*requests)
    for one in requests:
        assert bench.tokens(one.id) == bench.plain(one)
    return [bench.of(one.id)[0].cached for one in requests]


def test_the_same_prompt_is_found_up_to_its_last_border():
    found = bench()
    assert run(found, request(1, prompt(21))) == [0]
    assert run(found, request(2, prompt(21))) == [16]
    # The last token is always computed.
    assert run(found, request(3, prompt(16))) == [8]


def prefill_steps(bench: Bench) -> list[int]:
    """The tokens of each row that did not decode."""
    return [length for batch in bench.batches for length in batch.q_lens[batch.decode_rows :]]


@pytest.mark.parametrize(
    ("length", "rows"),
    [(13, [13]), (16, [16]), (17, [16, 1]), (25, [16, 9]), (32, [16, 16]), (33, [16, 16, 1])],
)
def test_a_row_goes_on_behind_one_snapshot_and_ends_at_the_next(length: int, rows: list[int]):
    found = bench(snapshot_every=8)
    assert run(found, request(1, prompt(length))) == [0]
    assert prefill_steps(found) == rows
    assert run(found, request(2, prompt(length))) == [(length - 1) // 8 * 8]


def test_without_a_state_to_spare_a_prompt_is_cut():
    """As one that waits could lack it; a row of few tokens is cut anyway."""
    found = bench(num_states=1, max_num_seqs=1)
    run(found, request(1, prompt(13)))
    assert prefill_steps(found) == [8, 5]
    found = bench(num_states=3, max_num_seqs=3, max_batched_tokens=13)
    run(found, *(request(id, prompt(13, id)) for id in range(4)))
    assert prefill_steps(found)[:2] == [8, 5]
    found = bench(max_batched_tokens=5)
    run(found, request(1, prompt(13)))
    assert prefill_steps(found) == [5, 3, 5]


def test_a_longer_prompt_goes_on_from_the_last_snapshot_in_common():
    found = bench()
    run(found, request(1, prompt(21)))
    assert run(found, request(2, prompt(11) + [1] * 20)) == [8]
    assert run(found, request(3, prompt(7) + [1] * 20)) == [0]


@pytest.mark.parametrize("length", [15, 16, 17, 18])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_next_turn_goes_on_where_the_answer_ended(overlap: bool, length: int):
    """Also within a page; the last token of the answer, which ends it, is computed."""
    found = bench()
    found.executor.overlap = overlap
    turn = request(1, prompt(length), max_tokens=13)
    run(found, turn)
    said = turn.tokens + found.plain(turn)
    assert run(found, request(2, [*said, 5, 6, 7])) == [len(said) - 1]


@pytest.mark.parametrize("border", [15, 16, 17, 20])
def test_a_turn_whose_template_changes_how_the_answer_began_goes_on_from_before(border: int):
    """As reasoning that is left out of the history: neither the answer's end is found, nor a
    snapshot among the tokens that began it."""
    found = bench()
    began, kept = prompt(21), prompt(border)
    turn = structs.replace(request(1, began), generation_prompt_len=len(began) - border)
    run(found, turn)
    assert run(found, request(2, [*kept, *[1] * 20])) == [border // 8 * 8]


def test_a_preempted_sequence_has_snapshots_behind_where_its_answer_began():
    found = bench()
    sequence = Sequence(
        structs.replace(request(1, prompt(21)), generation_prompt_len=6),
        seed=0, arrival_index=0, max_model_len=64,
    )  # fmt: skip
    snapshots = found.engine.requests.snapshots
    assert snapshots.next_positions(sequence) == (8, 0)
    sequence.tokens += prompt(15)
    assert snapshots.next_positions(sequence) == (8, 16)
    sequence.num_computed_tokens = 16
    assert snapshots.next_positions(sequence) == (24, 32)


def test_two_next_turns_at_once_do_not_write_to_one_page():
    found = bench()
    turn = request(1, prompt(14), max_tokens=12)
    run(found, turn)
    said = turn.tokens + found.plain(turn)
    cached = run(found, request(2, [*said, 5]), request(3, [*said, 6]))
    assert cached == [len(said) - 1] * 2
    assert run(found, request(4, [*said, 7])) == [len(said) - 1]


def test_a_token_that_stops_an_answer_is_found_if_the_next_step_had_begun():
    found = bench()
    plain = found.plain(request(0, prompt(14), max_tokens=30))
    stop = next(token for place, token in enumerate(plain) if place > 9 and token not in plain[:9])
    turn = request(1, prompt(14), max_tokens=30, stop_ids=(stop,))
    run(found, turn)
    said = turn.tokens + found.plain(turn)
    assert said[-1] == stop
    assert run(found, request(2, [*said, 5, 6])) == [len(said)]


def test_of_prefixes_of_one_length_the_one_that_was_not_used_goes_first():
    found = bench(num_snapshots=2)
    for id, first in enumerate((3, 4)):
        run(found, request(id, prompt(12, first), max_tokens=1))
    assert run(found, request(10, prompt(12, 3), max_tokens=1)) == [8]
    run(found, request(11, prompt(12, 5), max_tokens=1))
    assert run(found, request(12, prompt(12, 4), max_tokens=1)) == [0]
    assert found.engine.requests.snapshots.num_used == 2


def test_a_preempted_sequence_goes_on_from_its_snapshot():
    """Of those that run the last is preempted; its first pages are not taken meanwhile."""
    found = bench(num_pages=13, max_num_seqs=2, max_model_len=40)
    first, second = (request(id, prompt(13, id), max_tokens=18) for id in (1, 2))
    run(found, first, second)
    computed = sum(sum(batch.q_lens) for batch in found.batches)
    assert found.engine.stats().preemptions > 0
    assert computed < 2 * (13 + 17) + 13 + 5


def test_salts_and_prompts_whose_tokens_are_all_needed_find_nothing():
    found = bench()
    run(found, request(1, prompt(21)))
    assert run(found, request(2, prompt(21), salt=b"other")) == [0]
    assert run(found, request(3, prompt(21), prompt_logprobs=0)) == [0]


def test_without_room_for_snapshots_nothing_is_found():
    found = bench(num_snapshots=0, prefix_cache=False)
    assert run(found, request(1, prompt(21))) == run(found, request(2, prompt(21))) == [0]


def test_the_state_after_a_step_that_stored_no_numbers_is_not_found():
    """Of an answer that stopped when that step had begun, and so does not learn of it."""
    found = bench()
    plain = found.plain(request(0, prompt(14), max_tokens=30))
    stop = next(token for place, token in enumerate(plain) if place > 9 and token not in plain[:9])
    turn = request(1, prompt(14), max_tokens=30, stop_ids=(stop,))
    found.executor.spoils.add((len(found.plain(turn)), 0))
    run(found, turn)
    said = turn.tokens + found.plain(turn)
    assert run(found, request(2, [*said, 5, 6])) == [8]
    assert run(found, request(3, [*said, 5, 6])) == [(len(said) + 1) // 8 * 8]


def test_a_snapshot_is_found_only_when_the_step_before_it_has_been_read():
    found = bench()
    plain = found.plain(request(0, prompt(14), max_tokens=30))
    stop = next(token for place, token in enumerate(plain) if place > 9 and token not in plain[:9])
    turn = request(1, prompt(14), max_tokens=30, stop_ids=(stop,))
    said = turn.tokens + found.plain(turn)
    found.add(turn)
    while not any(output.finish for output in found.step()):
        pass
    assert found.engine.stats().snapshots_used == 1, "of the prompt"
    found.step()
    assert found.engine.stats().snapshots_used == 2
    assert run(found, request(2, [*said, 5])) == [len(said)]


def test_what_a_row_without_numbers_has_read_is_not_found_again():
    """Neither pages nor snapshots, though the sequence was preempted meanwhile."""
    found = bench(max_num_seqs=1, num_states=2)
    run(found, request(1, prompt(21)))
    assert found.engine.stats().snapshots_used == 3, "two of the prompt, one behind the answer"
    found.add(request(2, prompt(21), max_tokens=9, priority=BACKGROUND))
    found.step(3)
    [sequence] = found.engine.requests.running()
    found.executor.fail_slots[sequence.slot] = "the logits are NaN"
    found.run(request(5, [1, 2, 3]))
    assert found.end(2).error == "the logits are NaN" and found.end(2).preemptions == 1
    assert found.of(2)[0].cached == 16
    assert found.engine.stats().snapshots_used == 1, "which nothing finds without its pages"
    assert run(found, request(3, prompt(21))) == [0]
    assert run(found, request(4, prompt(21))) == [16]
