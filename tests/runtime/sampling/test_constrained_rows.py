"""Constrained rows get the tokens and scores that TorchSampler gives.

It is asked on a CPU, where tests/runtime/sampling/test_sampler.py holds it to the definitions.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from runtime.messages import SamplingParams, TokenLogprob
from runtime.sampling.logprobs import LogprobsTensors, token_logprobs
from runtime.sampling.sampler import AllowedMasks, SamplerOutput
from runtime.sampling.state import is_constrained
from runtime.sampling.torch_sampler import TorchSampler
from runtime.scheduler.batch import LAST
from tests.support.examples import examples
from tests.support.kernels.constrained_rows_cases import ConstrainedSampler, Masks
from tests.support.kernels.sampler_cases import SamplerRow, is_right, params, torch_sampler

VOCAB = 1111  # some groups of 256, the last one cut, as is the last byte of a mask
MANY = tuple(range(40, 60))  # stop ids, more than a step can hold
KINDS = [
    params(temperature=0, logit_bias={5: 9.0, 1110: 9.5}),
    params(temperature=0.8, top_p=0.9, logit_bias={5: 3.0}, logprobs=4),
    params(top_k=30, allowed_ids=(3, 700, 701, 1110), logprobs=6),
    params(temperature=0, banned=((3,), (1, 3, 7), (2, 3, 8)), frequency_penalty=0.5),
    params(temperature=0.7, min_tokens=9, stop_ids=MANY, logit_bias={41: 80.0}),
    params(temperature=1.5, logprobs=3, logprob_ids=(9, 1, 1100)),
    params(temperature=0, logprobs=20),
    params(min_p=0.1, presence_penalty=1.0, repetition_penalty=1.2, logprobs=0),
    params(temperature=0.6, grammar="any", min_tokens=9, stop_ids=MANY, top_p=0.95, logprobs=2),
    params(temperature=0, grammar="any", allowed_ids=tuple(range(0, 1111, 2))),
]


def draw_eagerly(
    rows: list[SamplerRow], logits: Tensor, masks: Masks
) -> tuple[SamplerOutput, TorchSampler]:
    sampler = torch_sampler([row.new(slot) for slot, row in enumerate(rows)], logits.shape[1])
    ends = np.array([len(row.history) for row in rows])
    bits = [np.packbits(flags, bitorder="little") for flags in masks.values()]
    allowed = AllowedMasks(np.array(list(masks)), np.stack(bits)) if masks else None
    output = sampler.sample_slots(logits.float().clone(), np.arange(len(rows)), ends, allowed)
    return output, sampler


def noise(rows: int, vocab: int = VOCAB, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def some_masks(rows: list[SamplerRow], vocab: int, seed: int = 0) -> Masks:
    """For rows with a grammar; all of them allow token 0."""
    chance = np.random.default_rng(seed)
    masks = {
        row: chance.random(vocab) < chance.choice([0.02, 0.5, 0.99])
        for row, wanted in enumerate(rows)
        if wanted.params.grammar
    }
    for flags in masks.values():
        flags[0] = True
    return masks


def rows_of(kinds: list[SamplingParams], repeats: int = 1) -> list[SamplerRow]:
    history = (1, 2, 3, 5, 2, 3)
    return [
        SamplerRow(kind, seed=2**33 * number + 12345, history=history, prompt_len=4)
        for number, kind in enumerate(kinds * repeats)
    ]


def changed(
    row: SamplerRow, logits: Tensor, mask: NDArray[np.bool_] | None
) -> tuple[SamplerRow, Tensor]:
    """The row without what makes it constrained, and logits to the same effect."""
    values, wanted = logits.double().clone(), row.params
    for token, bias in wanted.logit_bias.items():
        values[token] += bias
    for ids in wanted.banned:
        said, before = row.history[row.prompt_len :], ids[:-1]
        if not before or said[-len(before) :] == before:
            values[ids[-1]] = -1e30
    below_min_tokens = len(row.history) - row.prompt_len < wanted.min_tokens and mask is None
    if below_min_tokens and len(wanted.stop_ids) > 8:
        values[list(wanted.stop_ids)] = -math.inf
    if wanted.allowed_ids:
        others = np.setdiff1d(np.arange(len(values)), wanted.allowed_ids)
        values[others] = -math.inf
    if mask is not None:
        values[torch.from_numpy(~mask)] = -math.inf
    fields = {
        name: getattr(wanted, name)
        for name in ("temperature", "top_p", "top_k", "min_p", "presence_penalty")
    }
    fields |= {
        "frequency_penalty": wanted.frequency_penalty,
        "repetition_penalty": wanted.repetition_penalty,
    }
    if len(wanted.stop_ids) <= 8 and mask is None:
        fields |= {"min_tokens": wanted.min_tokens, "stop_ids": wanted.stop_ids}
    return replace(row, params=params(**fields)), values


def likeliest(logits: Tensor, mask: NDArray[np.bool_] | None, count: int) -> list[int]:
    values = logits.double().numpy()
    values = values if mask is None else np.where(mask, values, -np.inf)
    return np.argsort(-values, kind="stable")[:count].tolist()


def told(drawn: SamplerOutput) -> dict[int, TokenLogprob]:
    if drawn.scores is None:
        return {}
    arrived = [tensor.cpu() for tensor in drawn.scores.tensors()]
    return dict(zip(drawn.scored, token_logprobs(arrived, drawn.widths), strict=True))


def vocab_on(device: str) -> int:
    return 151936 if device == "cuda" else VOCAB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_all_kinds_get_their_tokens_and_scores(device: str, dtype: torch.dtype) -> None:
    rows = rows_of(KINDS, 4 if device == "cuda" else 1)
    vocab = vocab_on(device)
    logits, masks = noise(len(rows), vocab).to(dtype), some_masks(rows, vocab)
    behind = ConstrainedSampler(rows, vocab, device)
    eager, on_cpu = draw_eagerly(rows, logits, masks)
    # Those that are only scored have their tokens.
    behind.last_token.copy_(eager.tokens)
    before = logits.clone()
    drawn, order = behind.sample_tokens(logits, [6] * len(rows), masks)
    assert torch.equal(logits, before), "a step's logits are only read"
    assert drawn.usable.all()
    constrained = [row for row in range(len(rows)) if is_constrained(rows[row].params)]
    assert order[: len(constrained)] == constrained
    differ: set[int] = set()
    for row, token in zip(constrained, drawn.tokens.tolist(), strict=True):
        assert behind.last_token[row] == token
        if token != eager.tokens[row]:
            differ.add(row)
            assert is_right(token, *changed(rows[row], logits[row], masks.get(row))), rows[row]
        elif rows[row].params.banned:
            recent = behind.constrained_rows._banned.recent[row].tolist()
            assert recent == on_cpu.banned.recent[row].tolist()
    assert len(differ) <= len(rows) // 10, "where rounding decides"
    wanted, found = told(eager), told(drawn)
    assert found.keys() == wanted.keys()
    for row, score in found.items():
        if row not in differ:
            check_score(score, wanted[row], rows[row], logits[row], masks.get(row))


def check_score(
    score: TokenLogprob,
    wanted: TokenLogprob,
    row: SamplerRow,
    logits: Tensor,
    mask: NDArray[np.bool_] | None,
) -> None:
    ids, values = [id for id, _ in score.top], [value for _, value in score.top]
    assert score.rank == wanted.rank and score.logprob == pytest.approx(wanted.logprob, abs=2e-5)
    assert values == pytest.approx([value for _, value in wanted.top], abs=2e-5)
    if row.params.logprob_ids:
        assert ids == list(row.params.logprob_ids)
    else:  # of equal ones, a CPU takes any
        assert ids == likeliest(logits, mask, len(ids))


some_tokens = st.integers(0, 599)
some_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    top_k=st.sampled_from([0, 3]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7]),
    min_tokens=st.sampled_from([0, 3]),
    stop_ids=st.lists(some_tokens, max_size=12, unique=True).map(tuple),
    logit_bias=st.dictionaries(some_tokens, st.sampled_from([-100.0, 3.25, 7.0]), max_size=3),
    banned=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), max_size=3).map(
        tuple
    ),
    allowed_ids=st.one_of(
        st.just(()), st.lists(some_tokens, min_size=20, max_size=30, unique=True).map(tuple)
    ),
    logprobs=st.sampled_from([None, 0, 3]),
    grammar=st.sampled_from(["", "any"]),
)
some_rows = st.builds(
    SamplerRow,
    some_params,
    seed=st.integers(0, 2**64 - 1),
    history=st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple),
    prompt_len=st.integers(1, 6),
)
fixture_is_a_name = [HealthCheck.function_scoped_fixture]


@examples(25, derandomize=True, suppress_health_check=fixture_is_a_name)
@given(rows=st.lists(some_rows, min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_every_row_gets_the_token_that_the_definitions_give(
    device: str, rows: list[SamplerRow], seed: int
) -> None:
    rows = [replace(row, prompt_len=min(row.prompt_len, len(row.history))) for row in rows]
    logits, masks = noise(len(rows), seed=seed).to(torch.bfloat16), some_masks(rows, VOCAB, seed)
    for row, flags in masks.items():  # a list and a grammar that have nothing in common are errors
        flags[list(rows[row].params.allowed_ids[:1])] = True
    behind = ConstrainedSampler(rows, VOCAB, device)
    drawn, order = behind.sample_tokens(logits, [len(row.history) for row in rows], masks)
    assert drawn.usable.all()
    for token, row in zip(drawn.tokens.tolist(), order[: len(drawn.tokens)], strict=True):
        assert is_right(token, *changed(rows[row], logits[row], masks.get(row))), rows[row]
        assert behind.last_token[row] == token
        if rows[row].params.has_penalties:
            counted = (token in rows[row].history[: rows[row].prompt_len]) * (1 << 14)
            counted += rows[row].history[rows[row].prompt_len :].count(token) + 1
            assert behind.state.counts[row, token] == counted


def test_a_row_alone_gets_the_same_token_and_scores_as_in_a_batch(device: str) -> None:
    rows = rows_of(KINDS, 8 if device == "cuda" else 1)
    vocab = vocab_on(device)
    logits, masks = noise(len(rows), vocab, seed=1).to(torch.bfloat16), some_masks(rows, vocab)
    together, order = ConstrainedSampler(rows, vocab, device).sample_tokens(
        logits, [6] * len(rows), masks
    )
    tokens = dict(zip(order, together.tokens.tolist(), strict=False))
    scores = told(together)
    alone = ConstrainedSampler(rows, vocab, device)
    for row in range(0, len(rows), 3):
        mask = {0: masks[row]} if row in masks else {}
        drawn, _ = alone.sample_tokens(logits[row : row + 1], [6], mask, slots=[row])
        assert drawn.tokens.tolist() == ([tokens[row]] if row in tokens else [])
        assert told(drawn) == ({0: scores[row]} if row in scores else {})


def one(
    device: str, wanted: SamplingParams, logits: Tensor, masks: Masks
) -> tuple[ConstrainedSampler, SamplerOutput]:
    behind = ConstrainedSampler([SamplerRow(wanted)], logits.shape[1], device)
    return behind, behind.sample_tokens(logits, [1], masks)[0]


def scores_of(drawn: SamplerOutput) -> LogprobsTensors:
    assert drawn.scores is not None
    return drawn.scores


def test_of_equally_likely_tokens_those_of_the_least_ids_are_told(device: str) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [1110, 300, 301]] = 2.0
    wanted = params(temperature=0, logprobs=6, logit_bias={301: 1.0})
    drawn = scores_of(one(device, wanted, logits, {})[1])
    assert drawn.top_ids.tolist() == [[300, 301, 1110, 0, 1, 2]]
    assert drawn.ranks.tolist() == [1], "none is likelier than the first three"


def test_more_alternatives_than_there_are_tokens_are_all_of_the_tokens(device: str) -> None:
    logits = noise(1, vocab=40)
    drawn = one(device, params(temperature=0, logprobs=2**40, logit_bias={7: 1.0}), logits, {})[1]
    assert scores_of(drawn).top_ids.tolist() == [likeliest(logits[0], None, 40)]


def test_scores_are_of_what_a_grammar_allows_and_not_of_a_bias(device: str) -> None:
    logits = noise(1)
    flags = np.zeros(VOCAB, dtype=np.bool_)
    flags[[3, 256, 1110]] = True
    wanted = params(temperature=0, logprobs=5, logit_bias={256: 50.0, 4: 99.0}, grammar="any")
    drawn = one(device, wanted, logits, {0: flags})[1]
    among = logits[0, [3, 256, 1110]].log_softmax(-1)
    assert drawn.tokens.tolist() == [256]
    assert scores_of(drawn).logprobs.item() == pytest.approx(among[1].item(), abs=1e-5)
    assert scores_of(drawn).ranks.item() == int((among > among[1]).sum()) + 1
    assert scores_of(drawn).top_logprobs[0, 3:].tolist() == [-math.inf] * 2
    [score] = token_logprobs([tensor.cpu() for tensor in scores_of(drawn).tensors()], [5])
    order = among.argsort(descending=True).tolist()
    assert [id for id, _ in score.top] == [[3, 256, 1110][place] for place in order]


# The scores of such rows are not used; the interpreter computes them with NumPy.
@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [7, 1000])
def test_logits_that_are_not_finite_spoil_only_their_own_row(
    device: str, bad: float, place: int
) -> None:
    rows = rows_of([KINDS[0], KINDS[1], KINDS[2]], 2)
    logits = noise(6, seed=3)
    clean, _ = ConstrainedSampler(rows, VOCAB, device).sample_tokens(logits, [6] * 6, {})
    logits[3:5, place] = bad
    drawn, order = ConstrainedSampler(rows, VOCAB, device).sample_tokens(logits, [6] * 6, {})
    assert order == list(range(6))
    assert drawn.usable.tolist() == [True] * 3 + [False] * 2 + [True]
    same = [0, 1, 2, 5]
    assert drawn.tokens[same].tolist() == clean.tokens[same].tolist()
    assert all(0 <= token < VOCAB for token in drawn.tokens.tolist())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.filterwarnings("ignore:divide by zero encountered")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
@pytest.mark.parametrize("bad", [False, True])
def test_a_row_that_may_take_nothing_is_usable_unless_its_logits_are_nan(
    device: str, bad: bool
) -> None:
    flags = np.zeros(VOCAB, dtype=np.bool_)
    flags[5] = True
    wanted = params(grammar="any", allowed_ids=(6, 7), logprobs=3)
    logits = torch.full((1, VOCAB), math.nan) if bad else noise(1)
    drawn = one(device, wanted, logits, {0: flags})[1]
    assert drawn.usable.tolist() == [not bad]
    assert bad or drawn.tokens.item() == LAST


def test_many_stop_ids_are_masked_until_min_tokens_and_no_longer(device: str) -> None:
    wanted = params(temperature=0, min_tokens=2, stop_ids=MANY, logit_bias={41: 1.0, 7: 0.5})
    behind = ConstrainedSampler(
        [SamplerRow(wanted, history=(1, 2, 3), prompt_len=3)], VOCAB, device
    )
    taken = [
        behind.sample_tokens(torch.zeros(1, VOCAB), [end], {})[0].tokens.item() for end in (3, 4, 5)
    ]
    assert taken == [7, 7, 41]


def test_what_is_banned_depends_on_the_tokens_drawn_before(device: str) -> None:
    wanted = params(temperature=0, banned=((9, 9), (9, 8, 9), (8, 8), (5,)))
    behind = ConstrainedSampler([SamplerRow(wanted)], VOCAB, device)
    logits = torch.zeros(1, VOCAB)
    logits[0, [5, 9, 8, 7]] = torch.tensor([9.0, 3.0, 2.0, 1.0])
    taken = [behind.sample_tokens(logits, [1 + step], {})[0].tokens.item() for step in range(6)]
    assert taken == [9, 8, 7, 9, 8, 7]


def test_where_all_that_is_allowed_is_banned_the_ban_yields(device: str) -> None:
    wanted = params(banned=((8,), (9,), (9,)), allowed_ids=(8, 9), repetition_penalty=1.5)
    drawn = one(device, wanted, noise(1), {})[1]
    assert drawn.usable.tolist() == [True] and drawn.tokens.item() == 8, "banned only once"
