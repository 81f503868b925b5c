"""The sampling state of a slot on the device, and which requests are constrained rows."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from runtime.messages import SamplingParams
from runtime.sampling.kernels.row import ROW
from runtime.sampling.state import IN_PROMPT, ROW_WORDS, SamplerState, is_constrained
from runtime.scheduler.batch import NewRow
from tests.support.kernels.sampler_cases import params


def state_on(device: str, slots: int = 4, vocab: int = 50) -> SamplerState:
    return SamplerState(slots, vocab, torch.device(device))


def rows_in(state: SamplerState) -> np.ndarray:
    return state.rows.cpu().numpy().view(ROW)[:, 0]


def test_a_slot_knows_what_its_newest_row_said(device: str) -> None:
    state = state_on(device)
    first = params(temperature=0.5, top_k=7, min_tokens=2, stop_ids=(3, 4))
    second = params(top_p=0.25, min_p=0.5, presence_penalty=1.5, repetition_penalty=1.25)
    block = np.zeros((3, ROW_WORDS), dtype=np.int32)
    state.pack([NewRow(2, first, 5, 9, []), NewRow(0, first, 5, 9, [])], block)
    state.apply(torch.from_numpy(block).to(device))
    state.pack([NewRow(2, second, 2**40 + 6, 11, [])], block)
    state.apply(torch.from_numpy(block).to(device))
    old, _, new, _ = rows_in(state)
    assert (old["temperature"], old["top_k"], old["top_p"], old["seed_low"]) == (0.5, 7, 1, 5)
    assert old["stop_ids"].tolist() == [3, 4] + [-1] * 6 and old["min_tokens"] == 2
    assert (new["slot"], new["top_p"], new["presence"], new["repetition"]) == (2, 0.25, 1.5, 1.25)
    assert new["log_min_p"] == np.log(np.float32(0.5)) and new["penalties"] == 1
    assert (new["seed_low"], new["seed_high"], new["prompt_len"]) == (6, 256, 11)
    assert set(new["stop_ids"].tolist()) == {-1} and new["top_k"] == 0
    assert state.rows[[1, 3]].cpu().any().item() is False


def test_numbers_that_mean_nothing_are_off(device: str) -> None:
    state = state_on(device)
    wide = params(top_k=50, min_p=0.0, min_tokens=2**40)
    block = np.zeros((1, ROW_WORDS), dtype=np.int32)
    state.pack([NewRow(1, wide, -1, 1, [])], block)
    row = block.view(ROW)[0, 0]
    assert row["top_k"] == 0 and row["log_min_p"] == -np.inf and row["penalties"] == 0
    assert row["seed_low"] == row["seed_high"] == 0xFFFF_FFFF and row["min_tokens"] == 1 << 30


def test_every_float_of_the_params_has_a_column_on_the_device() -> None:
    floats = [each.name for each in msgspec.structs.fields(SamplingParams) if each.type is float]
    columns = {"log_min_p": "min_p"}
    names = {columns.get(name, name) for name in ROW.names}
    assert {name.removesuffix("_penalty") for name in floats} <= names


def test_a_block_that_is_too_small_says_so() -> None:
    state = state_on("cpu")
    block = np.zeros((1, ROW_WORDS), dtype=np.int32)
    with pytest.raises(ValueError, match=r"2 sequences begin in one step and the block has 1 rows"):
        state.pack([NewRow(slot, params(), 0, 1, []) for slot in range(2)], block)


def test_counts_separate_the_prompt_from_the_answer() -> None:
    state = state_on("cpu")
    state.counts[1] = 3
    state.count(1, [5, 6, 5, 6, 7, 7], prompt_len=3)
    expected = np.zeros(50, dtype=np.int16)
    expected[[5, 6, 7]] = [IN_PROMPT, IN_PROMPT + 1, 2]
    assert state.counts[1].tolist() == expected.tolist()
    state.count(1, [4] * (IN_PROMPT + 9), prompt_len=1)
    assert state.counts[1, 4] == 2 * IN_PROMPT - 1 and state.counts[1].sum() == 2 * IN_PROMPT - 1


def test_its_memory_is_two_bytes_a_token_and_slot() -> None:
    assert state_on("cpu", slots=8, vocab=1000).nbytes == 8 * (2 * 1000 + ROW.itemsize)


@pytest.mark.parametrize(
    ("expected", "constrained"),
    [
        (params(), False),
        (params(top_k=3, min_p=0.1, presence_penalty=1.0), False),
        (params(logit_bias={3: 1.0}), True),
        (params(allowed_ids=(1, 2)), True),
        (params(banned=((1, 2),)), True),
        (params(logprobs=0), False),
        (params(grammar="any"), True),
        (params(min_tokens=1, stop_ids=tuple(range(8))), False),
        (params(min_tokens=1, stop_ids=tuple(range(9))), True),
        (params(stop_ids=tuple(range(9))), False),
    ],
)
def test_rows_with_parameters_that_the_kernels_lack_are_constrained(
    expected: SamplingParams, constrained: bool
) -> None:
    assert is_constrained(expected) is constrained
