"""Allowed tokens and banned sequences, sampled by the sampler."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.messages import MAX_BANNED_TOKENS, EngineRequest, SamplingParams
from runtime.sampling.logprobs import token_logprobs
from runtime.sampling.torch_sampler import TorchSampler
from runtime.scheduler.batch import NewRow
from runtime.scheduler.waiting_queue import validation_error
from tests.support.engine.bench import Bench, request, resolved
from tests.support.kernels.sampler_cases import torch_sampler

VOCAB = 7


def slots_of(*rows: SamplingParams, histories: list[list[int]] | None = None) -> TorchSampler:
    """The prompt of each row is the token 0, unless a history says otherwise."""
    return torch_sampler(new_rows(list(rows), histories or [[0]] * len(rows)), VOCAB)


def new_rows(rows: list[SamplingParams], histories: list[list[int]]) -> list[NewRow]:
    return [NewRow(slot, row, 7, 1, histories[slot]) for slot, row in enumerate(rows)]


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=100, temperature=0.0, **fields)


def say(slots: TorchSampler, count: int, *, first: int = 1, rows: int = 1) -> list[list[int]]:
    """What each row says when the model likes 6 best, then 5, and so on."""
    said: list[list[int]] = [[] for _ in range(rows)]
    for place in range(first, first + count):
        logits = torch.arange(VOCAB, dtype=torch.float32).repeat(rows, 1)
        drawn = slots.sample_slots(logits, np.arange(rows), np.full(rows, place))
        assert drawn.usable.all()
        for row, token in enumerate(drawn.tokens.tolist()):
            said[row].append(token)
    return said


def test_only_allowed_tokens_are_taken() -> None:
    drawn = SamplingParams(max_tokens=100, temperature=2.0, allowed_ids=(1, 3))
    [best, other, drawn_row] = say(
        slots_of(greedy(allowed_ids=(2, 4)), greedy(), drawn), 30, rows=3
    )
    assert best == [4] * 30
    assert other == [6] * 30
    assert set(drawn_row) == {1, 3}


def test_a_single_banned_token_never_comes() -> None:
    assert say(slots_of(greedy(banned=((6,), (5,)))), 3) == [[4, 4, 4]]


def test_a_sequence_is_banned_only_where_it_would_be_completed() -> None:
    assert say(slots_of(greedy(banned=((6, 6, 6),))), 8) == [[6, 6, 5, 6, 6, 5, 6, 6]]


def test_sequences_of_several_lengths_are_banned_at_once() -> None:
    banned = ((6, 6), (6, 5, 6), (5, 5))
    assert say(slots_of(greedy(banned=banned)), 6) == [[6, 5, 4, 6, 5, 4]]


def test_the_prompt_is_no_part_of_a_banned_sequence() -> None:
    slots = slots_of(greedy(banned=((6, 6),)), histories=[[6]])
    assert say(slots, 2) == [[6, 5]]


def test_a_preempted_row_remembers_what_it_said() -> None:
    row = greedy(banned=((6, 6, 6),))
    slots = slots_of(row, histories=[[0, 4, 6, 6]])
    assert say(slots, 1, first=4) == [[5]]


def test_the_next_sequence_in_a_slot_inherits_nothing() -> None:
    slots = slots_of(greedy(banned=((6, 6),), allowed_ids=(6, 5)))
    say(slots, 1)
    slots.reset(new_rows([greedy()], [[0]]))
    assert say(slots, 2) == [[6, 6]]
    slots.reset(new_rows([greedy(banned=((6, 6),))], [[0]]))
    assert say(slots, 2) == [[6, 5]]


def test_where_nothing_else_is_allowed_the_ban_yields() -> None:
    assert say(slots_of(greedy(allowed_ids=(3,), banned=((3, 3),))), 4) == [[3] * 4]
    drawn = SamplingParams(max_tokens=9, temperature=1.0, allowed_ids=(2, 3), banned=((2,), (3,)))
    assert set(say(slots_of(drawn), 30)[0]) == {2, 3}


def test_the_longest_sequence_that_is_taken_is_found() -> None:
    longest = (6,) * MAX_BANNED_TOKENS
    [said] = say(slots_of(greedy(banned=(longest, (1,)))), MAX_BANNED_TOKENS + 1)
    assert said == [6] * (MAX_BANNED_TOKENS - 1) + [5, 6]


@settings(max_examples=60, deadline=None)
@given(
    banned=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple),
        min_size=1,
        max_size=4,
    ),
    allowed=st.sets(st.integers(0, VOCAB - 1), max_size=3),
)
def test_an_answer_is_the_likeliest_that_the_definition_permits(
    banned: list[tuple[int, ...]], allowed: set[int]
) -> None:
    row = greedy(banned=tuple(banned), allowed_ids=tuple(sorted(allowed)))
    [said] = say(slots_of(row), 8)
    wanted: list[int] = []
    for _ in range(8):
        ends = [b[-1] for b in banned if tuple(wanted[len(wanted) - len(b) + 1 :]) == b[:-1]
                and len(b) <= len(wanted) + 1]  # fmt: skip
        choices = sorted(allowed or range(VOCAB), reverse=True)
        free = [token for token in choices if token not in ends]
        wanted.append((free or [said[len(wanted)]])[0])
    assert said == wanted
    assert all(token in (allowed or range(VOCAB)) for token in itertools.chain(said))


def test_the_tokens_asked_for_are_reported_instead_of_the_likeliest() -> None:
    rows = (greedy(logprobs=3, logprob_ids=(1, 6, 0)), greedy(logprobs=2), greedy(logprobs=0))
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    drawn = slots_of(*rows).sample_slots(logits.clone(), np.arange(3), np.full(3, 1))
    assert drawn.scores is not None
    asked, likeliest, alone = token_logprobs(drawn.scores.tensors(), drawn.widths)
    exact = logits.double().log_softmax(-1)
    assert [token for token, _ in asked.top] == [1, 6, 0]
    for token, logprob in asked.top:
        assert logprob == pytest.approx(exact[0, token].item(), abs=1e-5)
    assert asked.logprob == pytest.approx(exact[0].max().item(), abs=1e-5)
    assert [token for token, _ in likeliest.top] == exact[1].argsort(descending=True)[:2].tolist()
    assert alone.top == []


def test_a_preempted_sequence_brings_its_answer_for_what_it_bans() -> None:
    bench = Bench(page_size=4, num_pages=6, max_model_len=20)
    prompts = {1: [1, 2, 3, 4, 5], 2: [11, 12, 13, 14, 15]}
    bench.run(
        *(request(id, prompt, max_tokens=12, banned=((1, 2),)) for id, prompt in prompts.items())
    )
    rows = [row for batch in bench.batches for row in batch.new_rows]
    assert bench.engine.requests.num_preemptions == len(rows) - 2 > 0
    for row in rows:
        assert row.history[:5] in prompts.values()
    assert any(len(row.history) > 5 for row in rows)


@pytest.mark.parametrize(
    "fields", [{"allowed_ids": (VOCAB,)}, {"banned": ((1, -1),)}, {"logprob_ids": (VOCAB + 5,)}]
)
def test_ids_that_the_model_does_not_have_are_refused(fields: dict[str, Any]) -> None:
    reason = validation_error(EngineRequest(1, 0, [1], greedy(**fields)), resolved(), VOCAB)
    assert reason is not None and next(iter(fields)) in reason
