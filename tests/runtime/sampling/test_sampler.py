"""The sampler against plain Python, one row at a time."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runtime.messages import SamplingParams
from runtime.sampling import torch_sampler as torch_sampler_module
from runtime.sampling.logprobs import token_logprobs
from runtime.sampling.rng import philox, uniform
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.sampling.torch_sampler import TorchSampler
from runtime.scheduler.batch import LAST, NewRow
from tests.support.examples import examples
from tests.support.kernels.sampler_cases import torch_sampler

VOCAB = 97  # odd, so that no padding can hide


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=100, **fields)  # type: ignore[arg-type]


def fill(
    rows: list[tuple[SamplingParams, int, list[int], int]],
    vocab: int = VOCAB,
) -> TorchSampler:
    """A sampler whose slots hold (params, seed, history, prompt_len) in order."""
    new_rows = [
        NewRow(slot, params, seed, prompt_len, history)
        for slot, (params, seed, history, prompt_len) in enumerate(rows)
    ]
    return torch_sampler(new_rows, vocab)


def draw_all(logits: Tensor, slots: TorchSampler, positions: list[int]) -> SamplerOutput:
    ids = np.arange(len(positions), dtype=np.int64)
    return slots.sample_slots(logits.clone(), ids, np.asarray(positions, dtype=np.int64))


def expected(
    logits: list[float], params: SamplingParams, seed: int, history: list[int], prompt_len: int
) -> set[int]:
    """The token that the definitions give: sets of two where rounding may decide."""
    values = np.asarray(logits, dtype=np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    output = Counter(history[prompt_len:])
    if params.has_penalties:
        for token in set(history):
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        for token, count in output.items():
            values[token] -= params.frequency_penalty * count + params.presence_penalty
    if len(history) - prompt_len < params.min_tokens:
        values[list(params.stop_ids)] = -np.inf
    if params.temperature == 0 or params.top_k == 1:
        return {int(values.argmax())}
    p = np.exp((values - values.max()) / params.temperature)
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda token: -p[token])
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        whole, reached, nucleus = sum(p[token] for token in kept), 0.0, []
        for token in kept:
            if nucleus and reached >= params.top_p * whole:
                break
            nucleus.append(token)
            reached += p[token]
        kept = nucleus
    kept = [token for token in kept if p[token] >= params.min_p * p.max()]
    weights = np.where(np.isin(np.arange(len(p)), kept), p, 0)
    cumulative = np.cumsum(weights) / weights.sum()
    number = uniform(np.asarray([seed], dtype=np.uint64), np.asarray([len(history)]))[0]
    return {int(np.searchsorted(cumulative, number + d, side="right")) for d in (-1e-6, 1e-6)}


tokens = st.integers(0, VOCAB - 1)
some_params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 10, 96, 97, 500]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_ids=st.lists(tokens, max_size=3, unique=True).map(tuple),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -2.5, 3.25, 100.0]), max_size=4),
)
some_rows = st.lists(
    st.tuples(
        some_params,
        st.integers(0, 2**63 - 1),
        st.lists(tokens, min_size=1, max_size=12),
        st.integers(1, 12),
    ),
    min_size=1,
    max_size=6,
)


@examples(150)
@given(rows=some_rows, noise=st.integers(0, 2**32))
def test_every_row_gets_the_token_that_the_definitions_give(
    rows: list[tuple[SamplingParams, int, list[int], int]], noise: int
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(noise)) * 3
    rows = [(p, seed, history, min(n, len(history))) for p, seed, history, n in rows]
    drawn = draw_all(logits, fill(rows), [len(history) for _, _, history, _ in rows])
    assert drawn.usable.all()
    for row, token in enumerate(drawn.tokens.tolist()):
        assert token in expected(logits[row].tolist(), *rows[row])


@examples(40)
@given(rows=some_rows, noise=st.integers(0, 2**32), data=st.data())
def test_a_row_alone_gets_the_same_token_as_in_a_batch(
    rows: list[tuple[SamplingParams, int, list[int], int]], noise: int, data: st.DataObject
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(noise)) * 3
    rows = [(p, seed, history, min(n, len(history))) for p, seed, history, n in rows]
    together = draw_all(logits, fill(rows), [len(history) for _, _, history, _ in rows]).tokens
    one = data.draw(st.integers(0, len(rows) - 1))
    alone = draw_all(logits[one : one + 1], fill([rows[one]]), [len(rows[one][2])]).tokens
    assert alone.item() == together[one].item()


def test_seed_and_position_alone_decide_the_draw() -> None:
    logits = torch.zeros(1, VOCAB)
    seen = {
        (seed, position): draw_all(
            logits, fill([(params(), seed, [1], 1)]), [position]
        ).tokens.item()
        for seed in (0, 1, 2**62)
        for position in range(1, 30)
    }
    again = {
        key: draw_all(logits, fill([(params(), key[0], [1], 1)]), [key[1]]).tokens.item()
        for key in reversed(seen)
    }
    assert seen == again
    assert len(set(seen.values())) > 30


def test_philox_gives_the_published_words() -> None:
    # Known answers of the Random123 library for philox4x32-10.
    ones = 0xFFFF_FFFF
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0]
    counters = np.asarray([[0] * 4, [ones] * 4, pi[0]], dtype=np.uint64).T
    keys = np.asarray([[0] * 2, [ones] * 2, pi[1]], dtype=np.uint64).T
    words = philox((*counters,), (*keys,))
    assert [[f"{int(word):08x}" for word in row] for row in words.T] == [
        ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"],
        ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"],
        ["d16cfe09", "94fdcceb", "5001e420", "24126ea1"],
    ]


@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_numbers_are_uniform_and_do_not_follow_each_other(along: str) -> None:
    count = np.arange(200_000)
    if along == "positions":
        numbers = uniform(np.full(len(count), 7, dtype=np.uint64), count)
    else:
        numbers = uniform(count.astype(np.uint64), np.full(len(count), 7))
    assert numbers.min() > 0 and numbers.max() < 1
    # Chi-square with 255 and 1023 degrees of freedom: five standard deviations above the mean.
    single = np.bincount((numbers * 256).astype(int), minlength=256)
    pairs = (numbers[:-1] * 32).astype(int) * 32 + (numbers[1:] * 32).astype(int)
    for observed in (single, np.bincount(pairs, minlength=1024)):
        wanted = observed.sum() / len(observed)
        freedom = len(observed) - 1
        assert ((observed - wanted) ** 2 / wanted).sum() < freedom + 5 * math.sqrt(2 * freedom)


def test_tokens_come_as_often_as_their_probability_says() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    count = 20_000
    slots = fill([(params(temperature=0.5), seed, [0], 1) for seed in range(count)], vocab=5)
    logits = probabilities.log().div(2).expand(count, 5)  # halved: temperature 0.5 restores them
    drawn = draw_all(logits, slots, [1] * count).tokens
    observed = np.bincount(drawn.numpy(), minlength=5)
    wanted = probabilities.numpy() * count
    assert ((observed - wanted) ** 2 / wanted).sum() < 4 + 5 * math.sqrt(8)


@pytest.mark.parametrize("peak", [0.0, 30.0])
def test_nucleus_of_a_large_vocabulary_is_exact(peak: float) -> None:
    logits = torch.randn(3, 150_001, generator=torch.Generator().manual_seed(5))
    logits[:, 7] += peak
    rows = [(params(top_p=p, top_k=k), 3, [0], 1) for p, k in [(0.9, 0), (0.5, 0), (0.9, 4000)]]
    drawn = draw_all(logits, fill(rows, 150_001), [1, 1, 1]).tokens
    for row in range(3):
        assert drawn[row].item() in expected(logits[row].tolist(), *rows[row])


def test_tokens_of_equal_probability_stay_or_go_together() -> None:
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]]).expand(400, 4)
    rows = [(params(top_k=2), seed, [0], 1) for seed in range(400)]
    drawn = draw_all(logits, fill(rows, 4), [1] * 400).tokens
    assert set(drawn.tolist()) == {0, 1, 2}


def test_penalties_count_the_tokens_sampled_since() -> None:
    slots = fill([(params(temperature=0, frequency_penalty=1.0), 0, [3], 1)])
    logits = torch.zeros(1, VOCAB)
    logits[0, :3] = torch.tensor([2.5, 2.0, 1.0])
    taken = [draw_all(logits, slots, [1 + step]).tokens.item() for step in range(6)]
    assert taken == [0, 1, 0, 1, 0, 2] or taken == [0, 1, 0, 1, 2, 0]
    assert slots.last_token.tolist() == taken[-1:]


def test_a_slot_that_starts_over_forgets_its_counts_and_bias() -> None:
    old = params(temperature=0, frequency_penalty=2.0, logit_bias={5: 50.0})
    slots = fill([(old, 0, [1, 2, 2], 1)])
    new = NewRow(0, params(temperature=0, frequency_penalty=2.0), 0, 1, [9])
    slots.reset([new])
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 1.0
    assert draw_all(logits, slots, [1]).tokens.tolist() == [2]


def test_a_slot_that_starts_over_draws_the_numbers_of_its_new_seed() -> None:
    logits, slots = torch.zeros(1, VOCAB), fill([(params(), 1, [0], 1)])
    draw_all(logits, slots, [1])
    slots.reset([NewRow(0, params(), 2, 1, [])])
    drawn = [draw_all(logits, slots, [place]).tokens.item() for place in range(1, 9)]
    fresh = fill([(params(), 2, [0], 1)])
    assert drawn == [draw_all(logits, fresh, [place]).tokens.item() for place in range(1, 9)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_spoil_only_their_own_row(
    bad: float, temperature: float
) -> None:
    rows = [(params(temperature=temperature, top_p=0.9), seed, [0], 1) for seed in range(3)]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    clean = draw_all(logits, fill(rows), [1, 1, 1]).tokens
    logits[1, 40] = bad
    drawn = draw_all(logits, fill(rows), [1, 1, 1])
    assert drawn.usable.tolist() == [True, False, True]
    assert drawn.tokens[[0, 2]].tolist() == clean[[0, 2]].tolist()
    assert 0 <= int(drawn.tokens[1]) < VOCAB


@pytest.mark.parametrize("vocab", [VOCAB, 40_000])  # drawn as defined, and by blocks
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize(
    "wanted",
    [
        params(temperature=0),
        params(),
        params(top_k=3),
        params(allowed_ids=(5, 6), stop_ids=(5, 6), min_tokens=9),
    ],
)
def test_a_row_that_may_take_no_token_gets_none_and_is_usable_unless_its_logits_are_nan(
    wanted: SamplingParams, bad: bool, vocab: int
) -> None:
    slots = fill([(wanted, 1, [0], 1)] * 4, vocab)
    logits = torch.randn(4, vocab, generator=torch.Generator().manual_seed(1))
    if bad:
        logits[2] = math.nan
    bits = np.zeros((1, -(-vocab // 8)), dtype=np.uint8)
    ids = np.arange(4)
    drawn = slots.sample_slots(logits, ids, np.ones(4, np.int64), AllowedMasks(np.array([2]), bits))
    assert drawn.usable.tolist() == [True, True, not bad, True]
    got_none = {row for row in range(4) if drawn.usable[row] and drawn.tokens[row] == LAST}
    assert got_none == (set(range(4)) if wanted.min_tokens else {2}) - ({2} if bad else set())
    assert 0 <= int(slots.last_token.min()) <= int(slots.last_token.max()) < vocab


def test_values_beyond_every_limit_still_give_a_token_of_the_vocabulary() -> None:
    """The server refuses them; should one come through, it must not end the engine."""
    huge = 2**63
    rows = [
        (params(top_k=huge, min_tokens=huge, logprobs=huge), 2**70, [0], 1),
        (params(min_p=7.0), -1, [0], 1),
        (params(temperature=math.nan), 1, [0], 1),
        (params(top_p=math.nan), 1, [0], 1),
        (params(min_p=math.nan, top_p=-1.0, top_k=-5), 1, [0], 1),
    ]
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(4))
    drawn = draw_all(logits, fill(rows), [1] * len(rows))
    assert drawn.usable.all() and 0 <= int(drawn.tokens.min()) <= int(drawn.tokens.max()) < VOCAB
    assert drawn.tokens[1:3].tolist() == logits[1:3].argmax(-1).tolist()


def test_a_tiny_temperature_neither_overflows_nor_wanders() -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2)) * 1e4
    rows = [(params(temperature=t), 1, [0], 1) for t in (1e-30, 1e-6, 1e-4, 1e-3)]
    drawn = draw_all(logits, fill(rows), [1] * 4)
    assert drawn.usable.all()
    assert drawn.tokens.tolist() == logits.argmax(-1).tolist()


def test_logprobs_are_those_of_the_model_before_any_change() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    rows = [
        (params(temperature=0, logit_bias={11: 100.0}, logprobs=3), 0, [0], 1),
        (params(temperature=2.0), 0, [0], 1),
        (params(temperature=0.1, frequency_penalty=1.0, logprobs=0), 0, [0], 1),
    ]
    drawn = draw_all(logits, fill(rows), [1, 1, 1])
    assert drawn.scores is not None and drawn.scored == [0, 2]
    first, last = token_logprobs(drawn.scores.tensors(), drawn.widths)
    raw = logits.double().log_softmax(-1)
    assert drawn.tokens[0] == 11
    assert first.logprob == pytest.approx(raw[0, 11].item(), abs=1e-5)
    assert first.rank == int((raw[0] > raw[0, 11]).sum()) + 1
    assert [token for token, _ in first.top] == raw[0].argsort(descending=True)[:3].tolist()
    assert last.logprob == pytest.approx(raw[2, drawn.tokens[2]].item(), abs=1e-5)
    assert last.top == []


def test_scores_are_of_their_own_rows_however_few_rows_are_sampled_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_sampler_module, "CHUNK_LOGITS", 2 * VOCAB)
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(6))
    rows = [(params(temperature=0, logprobs=place % 3), 0, [0], 1) for place in range(5)]
    drawn = draw_all(logits, fill(rows), [1] * 5)
    assert drawn.scores is not None
    scores = dict(
        zip(drawn.scored, token_logprobs(drawn.scores.tensors(), drawn.widths), strict=True)
    )
    expected = logits.log_softmax(-1).max(dim=-1).values
    for row in range(5):
        assert scores[row].logprob == pytest.approx(expected[row].item(), abs=1e-5)
        assert len(scores[row].top) == row % 3


def test_a_row_with_a_grammar_may_end_before_min_tokens_and_another_may_not() -> None:
    wanted = params(temperature=0, min_tokens=9, stop_ids=(5,))
    logits = torch.zeros(2, VOCAB)
    logits[:, [5, 6]] = torch.tensor([3.0, 2.0])
    flags = np.isin(np.arange(VOCAB), [5, 6])
    allowed = AllowedMasks(np.array([1]), np.packbits(flags, bitorder="little")[None])
    slots = fill([(wanted, 0, [0], 1)] * 2)
    drawn = slots.sample_slots(logits, np.arange(2), np.ones(2, np.int64), allowed)
    assert drawn.tokens.tolist() == [6, 5]
