"""What prompts give besides tokens belongs to one sequence, and ends with its prompt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from runtime.executor.prompt_outputs import PromptOutputs
from runtime.messages import PoolingParams, SamplingParams
from runtime.scheduler.batch import Batch, NewRow, make_batch

VOCAB = 11
PLAIN = SamplingParams(max_tokens=4)
SCORED = SamplingParams(max_tokens=4, prompt_logprobs=1)
MEAN = SamplingParams(max_tokens=0, pooling=PoolingParams("mean"))


def one_row(slot: int, start: int, tokens: list[int]) -> Batch:
    return make_batch([slot], [start], [len(tokens)], tokens, [0], [], [True])


def logits_are_states(hidden: Tensor) -> Tensor:
    return hidden.clone()


def scores_of(prompts: PromptOutputs, batch: Batch, states: Tensor) -> list[float] | None:
    """The log-probabilities of the batch's only row, whose logits are its hidden states."""
    found = prompts.compute(batch, states, logits_are_states, all_hidden_states=True)
    if found is None:
        return None
    [scores] = found.logprobs(iter(found.tensors()), num_rows=1) or [None]
    return [score.logprob for score in scores or ()]


def test_all_states_are_wanted_of_prompts_that_run_and_not_of_those_that_were_given_up() -> None:
    prompts = PromptOutputs()
    rows = [NewRow(0, MEAN, 0, 9, []), NewRow(1, SCORED, 0, 5, []), NewRow(2, PLAIN, 0, 4, [])]
    first = make_batch(
        [0, 1, 2], [0] * 3, [4] * 3, [7] * 12, [1] * 3, [3, 4, 5], [False, False, True], 0, rows
    )
    assert prompts.needs_all_hidden_states(first), "of sequences that are new"
    for row in rows:
        prompts.reset(row)
    assert prompts.needs_all_hidden_states(first)
    of_mean, of_scored, plain = (one_row(slot, 4, [7]) for slot in (0, 1, 2))
    assert prompts.needs_all_hidden_states(of_mean) and prompts.needs_all_hidden_states(of_scored)
    assert not prompts.needs_all_hidden_states(plain), "though the others lie in their slots"
    assert not prompts.needs_all_hidden_states(one_row(1, 5, [7]))


@pytest.mark.parametrize("before", [SCORED, MEAN])
def test_a_sequence_gives_nothing_of_the_prompt_that_was_given_up_in_its_slot(
    before: SamplingParams,
) -> None:
    prompts = PromptOutputs()
    prompts.reset(NewRow(1, before, 0, 5, []))
    prompts.reset(NewRow(1, PLAIN, 0, 5, []))
    batch = one_row(1, 0, [1, 2, 3, 4, 5])
    assert not prompts.needs_all_hidden_states(batch)
    states = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    assert prompts.compute(batch, states, logits_are_states, all_hidden_states=False) is None


def test_the_tokens_behind_a_prompt_are_not_scored_with_it() -> None:
    """A preempted sequence computes its prompt and its output again, in one row."""
    prompts, tokens = PromptOutputs(), [1, 2, 3, 4, 5]
    prompts.reset(NewRow(1, SCORED, 0, 3, []))
    states = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = states.log_softmax(-1)
    assert scores_of(prompts, one_row(1, 0, tokens), states) == pytest.approx(
        [expected[place, tokens[place + 1]].item() for place in (0, 1)]
    )
    assert scores_of(prompts, one_row(1, 5, [6]), states[:1]) is None


def test_the_first_token_of_a_chunk_is_scored_by_the_last_state_of_the_chunk_before() -> None:
    prompts, tokens = PromptOutputs(), [1, 2, 3, 4, 5]
    prompts.reset(NewRow(1, SCORED, 0, 5, []))
    states = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0))
    expected = states.log_softmax(-1)
    first = scores_of(prompts, one_row(1, 0, tokens[:3]), states[:3]) or []
    then = scores_of(prompts, one_row(1, 3, tokens[3:]), states[3:]) or []
    assert first + then == pytest.approx(
        [expected[place, tokens[place + 1]].item() for place in range(4)]
    )
