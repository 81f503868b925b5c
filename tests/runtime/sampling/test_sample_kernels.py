"""The sampler's kernels give the tokens of TorchSampler, whatever else is in the
batch.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from runtime.sampling.kernels.sample import sample
from runtime.sampling.state import IN_PROMPT
from tests.support.examples import examples
from tests.support.kernels.sampler_cases import Kernels, SamplerRow, draw_eagerly, is_right, params

TYPES = [torch.bfloat16, torch.float16, torch.float32]
KINDS = [
    params(temperature=0),
    params(),
    params(temperature=0.6, top_k=20, top_p=0.95),
    params(top_p=0.9),
    params(top_k=5),
    params(min_p=0.1),
    params(temperature=2.0, top_p=0.99),
    params(top_k=900, top_p=0.8, min_p=0.01),
    params(temperature=0.7, top_p=0.8, repetition_penalty=1.2),
    params(temperature=0, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=0.9),
    params(top_k=1),
    params(top_p=1e-9),
    params(temperature=0.05, top_k=40),
    params(min_tokens=3, stop_ids=(1, 2, 3), top_k=3),
]


def vocab_on(device: str) -> int:
    """That of Qwen3 on a GPU; in the interpreter a few groups, the last one cut."""
    return 151936 if device == "cuda" else 1111


def noise(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def rows_of(kinds: list, repeats: int, start: int = 0) -> list[SamplerRow]:
    history = (1, 2, 3, 5, 3, 3)
    return [
        SamplerRow(kind, seed=2**33 * (start + number) + 12345, history=history, prompt_len=4)
        for number, kind in enumerate(kinds * repeats)
    ]


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_of_all_kinds_get_their_tokens_in_one_launch(device: str, dtype: torch.dtype) -> None:
    rows = rows_of(KINDS, 4 if device == "cuda" else 1, start=TYPES.index(dtype))
    logits = noise(len(rows), vocab_on(device)).to(dtype)
    tokens, usable = Kernels(rows, logits.shape[1], device).run(logits)
    eager = draw_eagerly(rows, logits).tokens.tolist()
    assert all(usable)
    for token, expected, row, values in zip(tokens, eager, rows, logits, strict=True):
        assert token == expected or is_right(token, row, values), row


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.3, 10.0])
def test_flat_and_steep_distributions_are_cut_where_they_should_be(
    device: str, scale: float
) -> None:
    kinds = [params(top_p=0.5), params(top_k=700, top_p=0.99), params(temperature=1.5, top_p=0.9)]
    rows = rows_of(kinds, 8 if device == "cuda" else 1)
    logits = (noise(len(rows), vocab_on(device), seed=1) * scale - 0.5).to(torch.bfloat16)
    tokens, _ = Kernels(rows, logits.shape[1], device).run(logits)
    for token, row, values in zip(tokens, rows, logits, strict=True):
        assert is_right(token, row, values), row


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_of_all_magnitudes_are_searched_and_those_that_round_alike_are_equal(
    device: str, dtype: torch.dtype
) -> None:
    kinds = [params(top_p=0.5), params(top_k=500), params(temperature=0.01, top_k=500, top_p=0.7)]
    rows = rows_of([*kinds, params(min_p=1.0)], 1)
    generator = torch.Generator().manual_seed(5)
    exponents = torch.rand(len(rows), 1111, generator=generator) * -120
    logits = torch.randn(len(rows), 1111, generator=generator).sign() * 2.0**exponents
    tokens, _ = Kernels(rows, 1111, device).run(logits.to(dtype))
    assert tokens == draw_eagerly(rows, logits.to(dtype)).tokens.tolist()


some_tokens = st.integers(0, 699)
some_params = st.builds(
    params,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 2, 10, 600, 700, 5000]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop_ids=st.lists(some_tokens, max_size=3, unique=True).map(tuple),
)
some_rows = st.builds(
    SamplerRow,
    some_params,
    seed=st.integers(0, 2**64 - 1),
    history=st.lists(some_tokens, min_size=1, max_size=12).map(tuple),
    prompt_len=st.integers(1, 12),
)
fixture_is_a_name = [HealthCheck.function_scoped_fixture]


@examples(25, derandomize=True, suppress_health_check=fixture_is_a_name)
@given(
    rows=st.lists(some_rows, min_size=1, max_size=4),
    dtype=st.sampled_from(TYPES),
    seed=st.integers(0, 2**32),
)
def test_every_row_gets_the_token_that_the_definitions_give(
    device: str, rows: list[SamplerRow], dtype: torch.dtype, seed: int
) -> None:
    rows = [replace(row, prompt_len=min(row.prompt_len, len(row.history))) for row in rows]
    logits = noise(len(rows), 700, seed).to(dtype)
    tokens, usable = Kernels(rows, 700, device).run(logits)
    assert all(usable)
    for token, row, values in zip(tokens, rows, logits, strict=True):
        assert is_right(token, row, values), row


def test_a_row_alone_gets_the_same_token_as_in_a_batch(device: str) -> None:
    """Rows are many enough on a GPU that programs read more of a row when they are together."""
    rows = rows_of(KINDS[1:9], 16 if device == "cuda" else 1)
    logits = noise(len(rows), vocab_on(device), seed=2).to(torch.bfloat16)
    together, _ = Kernels(rows, logits.shape[1], device).run(logits)
    kernels = Kernels(rows, logits.shape[1], device)
    for slot in range(0, len(rows), 3):
        assert kernels.run(logits[slot : slot + 1], [slot])[0] == [together[slot]]


def test_rows_that_do_not_sample_are_left_alone(device: str) -> None:
    kernels = Kernels(rows_of([params(), params(top_p=0.5), params(temperature=0)], 1), 300, device)
    logits = noise(5, 300)
    tokens, usable = kernels.run(logits, slots=[-1, 2, 0, -1, -1])
    assert usable == [True] * 5 and [tokens[row] for row in (0, 3, 4)] == [-1] * 3
    assert tokens[1] == logits[1].argmax() and 0 <= tokens[2] < 300
    assert kernels.last_token.tolist() == [tokens[2], -7, tokens[1]]


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_do_not_sample_are_unusable_if_their_logits_are_no_numbers(
    device: str, dtype: torch.dtype
) -> None:
    logits = noise(6, 300).to(dtype)
    logits[0] = math.nan
    logits[1] = math.inf
    logits[2, 7] = math.inf
    logits[3, 7] = -math.inf
    logits[4] = torch.finfo(dtype).max
    tokens, usable = Kernels([SamplerRow(params())], 300, device).run(logits, slots=[-1] * 6)
    assert usable == [False, False, False, True, True, True] and tokens == [-1] * 6


def test_the_first_of_equal_maxima_wins(device: str) -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [300, 301, 900]] = 2.0
    logits[1, :] = -0.0
    logits[1, 7] = 0.0  # not more than -0.0
    logits[2, [999, 513]] = 5.0
    rows = rows_of([params(temperature=0), params(temperature=0), params(top_k=1)], 1)
    assert Kernels(rows, 1000, device).run(logits)[0] == [300, 0, 513]


def test_tokens_of_equal_probability_stay_or_go_together(device: str) -> None:
    count = 600 if device == "cuda" else 20
    logits = torch.full((count, 600), -50.0)
    logits[:, [0, 200, 400, 599]] = torch.tensor([1.0, 2.0, 1.0, 0.0])
    rows = rows_of([params(top_k=2)], count)
    assert set(Kernels(rows, 600, device).run(logits)[0]) == {0, 200, 400}


def test_masked_tokens_are_never_sampled(device: str) -> None:
    kinds = [params(temperature=5.0), params(temperature=5.0, top_k=50), params(top_p=0.999)]
    rows = rows_of(kinds, 4)
    logits = torch.full((len(rows), 1500), -math.inf)
    logits[:, [3, 700, 1499]] = torch.tensor([1.0, 0.5, 1.5])
    tokens, usable = Kernels(rows, 1500, device).run(logits)
    assert all(usable) and set(tokens) <= {3, 700, 1499}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.nan])
def test_logits_that_are_not_finite_spoil_only_their_own_row(device: str, bad: float) -> None:
    rows = rows_of([params(temperature=0), params(), params(top_p=0.9, top_k=9)], 2)
    logits = noise(6, 600, seed=3)
    clean, _ = Kernels(rows, 600, device).run(logits)
    logits[3:, 400] = bad
    tokens, usable = Kernels(rows, 600, device).run(logits)
    assert usable == [True] * 3 + [False] * 3
    assert tokens[:3] == clean[:3] and all(0 <= token < 600 for token in tokens)


def test_a_row_that_may_take_no_token_gets_none_and_is_usable(device: str) -> None:
    rows = rows_of([params(temperature=0), params(), params(top_k=5, top_p=0.5)], 1)
    kernels = Kernels(rows, 300, device)
    tokens, usable = kernels.run(torch.full((3, 300), -math.inf))
    assert usable == [True] * 3 and tokens == [-1] * 3
    # A step that is under way may feed it.
    assert all(0 <= token < 300 for token in kernels.last_token.tolist())


def test_penalties_count_the_tokens_sampled_since(device: str) -> None:
    row = SamplerRow(params(temperature=0, frequency_penalty=1.0), history=(3,))
    kernels = Kernels([row], 97, device)
    logits = torch.zeros(1, 97)
    logits[0, :3] = torch.tensor([2.5, 2.0, 1.0])
    taken = [kernels.run(logits, [0], [1 + step])[0][0] for step in range(6)]
    assert taken in ([0, 1, 0, 1, 0, 2], [0, 1, 0, 1, 2, 0])
    counts = kernels.state.counts[0].tolist()
    assert counts[3] == IN_PROMPT and counts[:3] == [taken.count(token) for token in range(3)]
    assert kernels.last_token.tolist() == taken[-1:]


def test_a_full_count_does_not_run_over_into_the_mark_of_the_prompt(device: str) -> None:
    kernels = Kernels([SamplerRow(params(temperature=0, frequency_penalty=-0.1))], 97, device)
    kernels.state.counts[0, 5] = IN_PROMPT - 2
    logits = torch.zeros(1, 97)
    for _ in range(3):
        assert kernels.run(logits, [0], [1])[0] == [5]
    assert kernels.state.counts[0, 5] == IN_PROMPT - 1


def test_stop_ids_are_masked_until_min_tokens_and_no_longer(device: str) -> None:
    row = SamplerRow(params(temperature=0, min_tokens=2, stop_ids=(40, 41, 250)), history=(1, 2, 3))
    kernels = Kernels([replace(row, prompt_len=3)], 300, device)
    logits = torch.zeros(1, 300)
    logits[0, [40, 41, 250]] = 3.0
    taken = [kernels.run(logits, [0], [position])[0][0] for position in (3, 4, 5)]
    assert taken == [0, 0, 40]


def test_values_beyond_every_limit_still_give_a_token_of_the_vocabulary(device: str) -> None:
    """The server refuses them; should one come through, it must not end the engine."""
    huge = 2**63
    rows = [
        SamplerRow(params(top_k=huge, min_tokens=huge), 2**70),
        SamplerRow(params(min_p=7.0), -1),
        SamplerRow(params(temperature=math.nan), 1),
        SamplerRow(params(top_p=math.nan), 1),
        SamplerRow(params(min_p=math.nan, top_p=-1.0, top_k=-5), 1),
        SamplerRow(params(temperature=1e30, top_p=0.5), 1),
        SamplerRow(params(temperature=1e-4, top_p=0.5), 1),
    ]
    logits = noise(len(rows), 97, seed=4) * 1e4
    tokens, usable = Kernels(rows, 97, device).run(logits)
    assert all(usable) and all(0 <= token < 97 for token in tokens)
    assert [tokens[row] for row in (1, 2, 4, 6)] == logits[[1, 2, 4, 6]].argmax(-1).tolist()


def test_tokens_come_as_often_as_their_probability_says(device: str) -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625])
    count = 20_000 if device == "cuda" else 160
    rows = [SamplerRow(params(temperature=0.5), seed) for seed in range(count)]
    # Halved, as a temperature of 0.5 restores them; tokens of different groups.
    logits = torch.full((5 * 256,), -math.inf)
    logits[2::256] = probabilities.log().div(2)
    tokens, _ = Kernels(rows, len(logits), device).run(logits.expand(count, -1))
    assert {token % 256 for token in tokens} == {2}
    observed = np.bincount(np.asarray(tokens) // 256, minlength=5)
    expected = probabilities.numpy() * count
    # Five standard deviations of a chi-square of four degrees of freedom.
    assert ((observed - expected) ** 2 / expected).sum() < 4 + 5 * math.sqrt(8)


def test_logits_need_not_lie_side_by_side(device: str) -> None:
    """A GEMM may pad its output: rows begin at any distance from each other."""
    rows = rows_of(KINDS[:5], 1)
    padded = torch.full((5, 1000), math.nan)
    padded[:, :901] = noise(5, 901)
    tokens, usable = Kernels(rows, 901, device).run(padded[:, :901])
    assert all(usable)
    assert tokens == Kernels(rows, 901, device).run(padded[:, :901].contiguous())[0]


@pytest.mark.gpu
def test_a_captured_launch_follows_what_its_tensors_hold() -> None:
    rows = rows_of(KINDS, 2)
    vocab = vocab_on("cuda")
    kernels, again = Kernels(rows, vocab, "cuda"), Kernels(rows, vocab, "cuda")
    numbers = {"dtype": torch.int32, "device": "cuda"}
    logits = torch.zeros(len(rows), vocab, dtype=torch.bfloat16, device="cuda")
    slots, positions = torch.full((len(rows),), -1, **numbers), torch.zeros(len(rows), **numbers)
    tokens, usable = torch.zeros(len(rows), **numbers), torch.zeros(len(rows), **numbers)
    call = (logits, slots, positions, kernels.state, kernels.last_token, tokens, usable)
    sample(*call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(*call)
    for step in range(8):
        logits.copy_(noise(len(rows), vocab, seed=step))
        used = [slot if slot % 5 != step else -1 for slot in range(len(rows))]
        where = [6 + step] * len(rows)
        slots.copy_(torch.tensor(used))
        positions.copy_(torch.tensor(where))
        graph.replay()
        assert tokens.tolist() == again.run(logits, used, where)[0]
    assert torch.equal(kernels.state.counts, again.state.counts)


def test_tokens_go_to_the_place_that_the_output_tells_in_the_hosts_memory(device: str) -> None:
    rows = rows_of([params(temperature=0), params(top_p=0.5)], 1)
    kernels, again = Kernels(rows, 300, device), Kernels(rows, 300, device)
    numbers = {"dtype": torch.int32, "device": device}
    pinned = device == "cuda"
    tokens = torch.full((3, 20), -9, dtype=torch.int32, pin_memory=pinned)
    usable = torch.full((3, 20), 7, dtype=torch.int8, pin_memory=pinned)
    expected = tokens.clone(), usable.clone()
    for output in (2, 0):
        logits = noise(2, 300, seed=output)
        sample(
            logits.to(device), torch.tensor([0, 1], **numbers), torch.tensor([6, 6], **numbers),
            kernels.state, kernels.last_token, tokens[:, 4:6], usable[:, 9:11],
            torch.tensor([output], **numbers),
        )  # fmt: skip
        if pinned:
            torch.cuda.synchronize()
        expected[0][output, 4:6] = torch.tensor(again.run(logits)[0])
        expected[1][output, 9:11] = 1
        assert torch.equal(tokens, expected[0]) and torch.equal(usable, expected[1])
