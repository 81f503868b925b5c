"""Rows with nothing but a temperature take a faster path on a CPU, to the same tokens."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.messages import SamplingParams
from runtime.sampling import cpu
from runtime.sampling.cpu import few_allowed_rows
from runtime.sampling.rng import PREFETCH, UniformCache, uniform
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.sampling.torch_sampler import TorchSampler
from runtime.scheduler.batch import LAST, NewRow
from tests.support.kernels.sampler_cases import torch_sampler

FILTERED = SamplingParams(9, temperature=0.9, top_p=0.8, logprobs=2)


def slots_of(params: list[SamplingParams], vocab: int) -> TorchSampler:
    rows = [NewRow(slot, one, 7 * slot, 2, [3, 4]) for slot, one in enumerate(params)]
    return torch_sampler(rows, vocab)


def both(
    logits: torch.Tensor, params: list[SamplingParams], position: int, allowed: AllowedMasks | None
) -> tuple[SamplerOutput, SamplerOutput]:
    """What is drawn, and what would be if no row were known to be plain."""
    slots, other = (slots_of(params, logits.shape[-1]) for _ in range(2))
    other.params["plain"] = False
    ids, positions = np.arange(len(params)), np.full(len(params), position)
    found = slots.sample_slots(logits.clone(), ids, positions, allowed)
    wanted = other.sample_slots(logits.clone(), ids, positions, allowed)
    assert torch.equal(slots.last_token, found.tokens.clamp(min=0))
    return found, wanted


@settings(max_examples=120, deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32), vocab=st.sampled_from([1, 97, 256, 4099]))
def test_a_plain_row_gets_the_token_that_the_definition_gives(
    data: st.DataObject, seed: int, vocab: int
) -> None:
    kinds = st.sampled_from([0.0, 0.3, 1.0, 1.7]).map(lambda t: SamplingParams(9, temperature=t))
    params = data.draw(st.lists(kinds | st.just(FILTERED), min_size=1, max_size=7))
    draws = np.random.default_rng(seed)
    logits = draws.normal(0, data.draw(st.sampled_from([0.1, 3.0])), (len(params), vocab))
    for row in data.draw(st.lists(st.integers(0, len(params) - 1), max_size=2)):
        logits[row, draws.integers(vocab)] = data.draw(st.sampled_from([math.nan, math.inf, -1e38]))
    # Whether what a row may not take is a number is looked at only if it may take much.
    masked = np.flatnonzero((draws.random(len(params)) < 0.6) & ~np.isnan(logits).any(axis=-1))
    # Up to 4 bytes of bits, or all of them; padding is not for the sampler to trust.
    bits = draws.integers(0, 256, (len(masked), -(-vocab // 8)), dtype=np.uint8)
    for row in bits[::2]:
        row[draws.permutation(len(row))[4:]] = 0
    allowed = AllowedMasks(masked, bits) if data.draw(st.booleans()) else None
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    with patch.object(cpu, "SMALL", data.draw(st.sampled_from([0, cpu.SMALL]))):
        found, wanted = both(torch.from_numpy(logits).to(dtype), params, 2, allowed)
    assert found.usable.tolist() == wanted.usable.tolist()
    fine = found.usable
    assert found.tokens[fine].tolist() == wanted.tokens[fine].tolist()
    assert int(found.tokens.min()) >= LAST and int(found.tokens.max()) < vocab
    assert (found.scored, found.widths) == (wanted.scored, wanted.widths)
    scored = fine.all() and bool((found.tokens != LAST).all())
    if found.scores is not None and wanted.scores is not None and scored:
        pairs = zip(found.scores.tensors(), wanted.scores.tensors(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("spread", [0.0, 1.0, 30.0])
def test_numbers_at_the_very_edge_of_a_token_are_settled_by_the_definition(
    spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = np.random.default_rng(5).normal(0, spread, (1, 1000)).astype(np.float32)
    weights = np.exp(logits[0] - logits.max())
    units = (weights * cpu.UNITS).astype(np.int64)
    reached = units.cumsum()
    edges = reached[:-1:7] / reached[-1]
    as_defined, asked = cpu._sample_exactly, list[float]()

    def noted(weights: cpu.Float32Array, number: float) -> int:
        asked.append(number)
        return as_defined(weights, number)

    monkeypatch.setattr(cpu, "_sample_exactly", noted)
    monkeypatch.setattr(cpu, "SMALL", 0)
    for number in np.concatenate([edges, np.nextafter(edges, 0), edges + 2.0**-33, edges + 1e-4]):
        if not 0 < number < 1:
            continue
        one = np.array([1.0], dtype=np.float32)
        tokens, fine = cpu.sample_full_vocab(logits, np.array([0]), one, np.array([number]))
        target = int(reached[-1] * number)
        assert fine.all() and tokens[0] == np.searchsorted(reached, target, side="right")
    assert len(asked) > len(edges) / 2
    asked.clear()
    for number in np.random.default_rng(6).random(300):
        cpu.sample_full_vocab(logits, np.array([0]), one, np.array([number]))
    assert len(asked) < 3


def test_what_a_mask_says_of_tokens_behind_the_vocabulary_does_not_matter() -> None:
    bits = np.zeros((4, 125), dtype=np.uint8)
    bits[0, 3], bits[1, 124], bits[2, 124], bits[3] = 0b101, 0xF1, 0xF0, 0xFF
    few, is_few = few_allowed_rows(np.array([5, 2, 7, 1]), bits, 125 * 8 - 4)
    assert is_few.tolist() == [True, True, False, False]
    assert few.rows.tolist() == [5, 2]
    assert few.owners.tolist() == [0, 0, 1] and few.tokens.tolist() == [24, 26, 992]


def test_numbers_made_beforehand_are_those_of_their_seed_and_position() -> None:
    numbers = UniformCache(5)
    draws = np.random.default_rng(3)
    seeds = draws.integers(0, 2**63, 5).astype(np.uint64)
    positions = np.array([0, 1, 300, 2**31, 77])
    for step in range(3 * PREFETCH):
        slots = draws.permutation(5)[: step % 6]
        wanted = uniform(seeds[slots], positions[slots])
        assert numbers.take(slots, seeds[slots], positions[slots]).tolist() == wanted.tolist()
        positions[slots] += draws.integers(0, 3)
        if step % 50 == 49:
            seeds[step % 5] += np.uint64(1)
            numbers.reset(step % 5)
