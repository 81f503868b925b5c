"""The batch-invariant kernel: right, and with the same bits whatever else a step holds."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from attention.batch_invariant.kernel import BatchInvariantConfig, batch_invariant_config
from tests.support.attention.attention_oracle import FP8, OracleCase, check, make_case
from tests.support.attention.batch_invariant_kernel_runner import SMALL, Part, run, run_parts
from tests.support.interpreter.ordered_dot import ordered_dot  # noqa: F401

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [(1, 70), (1, 1), (5, 5), (3, 40), (0, 9), (1, 130), (33, 97)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"programs": 1}, {"programs": 20, "units": 12}])
def test_it_equals_dense_attention(dtype, options, device: str):
    """With tiles whole, cut, and cut as far as there is room."""
    case = make_case(ROWS, dtype=dtype, group=3, device=device)
    check(case, *run(case, **options))


@pytest.mark.parametrize("programs", [1, 20])
def test_windows_soft_caps_and_sinks_are_kept_to(programs: int, device: str):
    case = make_case(ROWS, window=41, softcap=3.0, sinks=True, device=device)
    check(case, *run(case, programs=programs))


@pytest.mark.parametrize("programs", [1, 20])
@pytest.mark.parametrize("window", [3, 41, 100])
def test_pages_before_a_window_that_were_freed_change_no_bit(
    programs: int, window: int, device: str
):
    """A prefix from the cache, or a sequence that has gone on, lacks them."""
    case = make_case([*ROWS, (1, 1300), (9, 1300)], window=window, device=device)
    kept = run(case, programs=programs)
    for row, (q_len, kv_len) in enumerate(case.rows):
        for index in range(max(kv_len - q_len + 1 - window, 0) // 16):
            page = case.page_table[row, index]
            case.k[page], case.v[page] = float("nan"), float("nan")
            case.page_table[row, index] = -1
    freed = run(case, programs=programs)
    assert torch.equal(freed[0], kept[0]) and torch.equal(freed[1], kept[1])


@pytest.mark.parametrize("programs", [1, 20])
def test_fp8_pages_and_odd_head_dims(programs: int, device: str):
    case = make_case(ROWS, kv_dtype=FP8, head_dim=80, page=32, device=device)
    check(case, *run(case, programs=programs))


def cuts(lengths: list[int], sizes: list[int]) -> Iterator[list[Part]]:
    """Steps that prefill all rows in chunks of random sizes, some in one step."""
    choose = random.Random(1)
    prefilled = [0] * len(lengths)
    while any(done < length for done, length in zip(prefilled, lengths, strict=True)):
        step: list[Part] = []
        for row in choose.sample(range(len(lengths)), len(lengths)):
            count = min(lengths[row] - prefilled[row], choose.choice(sizes))
            if count:
                step.append((row, prefilled[row], prefilled[row] + count))
                prefilled[row] += count
        if step:
            yield step


def compare(
    case: OracleCase,
    sizes: list[int],
    places: list[int],
    config: BatchInvariantConfig,
    programs: tuple[int, int],
) -> None:
    """All rows whole, in chunks of these sizes, and tokens of the last row at `places` alone.

    programs  too few for tiles to be cut, and enough
    """
    few, many = programs
    rows = [(row, 0, length) for row, (length, _) in enumerate(case.rows)]
    whole, lse, plan = run_parts(case, rows, config=config, programs=few)
    assert int(plan.counts[1]) == 0, "nothing was cut"
    alone = [[(len(rows) - 1, place, place + 1)] for place in places]
    for number, step in enumerate([*alone, *cuts([length for length, _ in case.rows], sizes)]):
        single = number < len(alone)
        out, found, plan = run_parts(
            case, step, config=config, programs=many if single or number % 2 else few
        )
        expected = [case.tokens(row).start + token for row, a, b in step for token in range(a, b)]
        assert torch.equal(out, whole[expected]), step
        assert torch.equal(found, lse[expected]), step
        if single and not case.window:
            assert int(plan.counts[1]) == (step[0][1] >= config.split), "a long row is cut"


FEATURES = [
    pytest.param(torch.float32, {}, marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, {}, marks=pytest.mark.slow),
    (torch.bfloat16, {"window": 41, "softcap": 3.0, "sinks": True}),
    pytest.param(torch.float16, {"kv_dtype": FP8}, marks=pytest.mark.slow),
    (torch.float32, {"group": 5, "head_dim": 40}),
]


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(("dtype", "features"), FEATURES, ids=str)
def test_a_token_has_the_same_bits_alone_and_in_every_chunk_and_batch(dtype, features, device: str):
    case = make_case([(n, n) for n in (1, 20, 70)], dtype=dtype, **features, device=device)
    compare(case, [0, 2, 19, 33], [31, 32, 69], SMALL, (3, 20))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_so_it_has_in_the_configuration_that_serves(dtype, head_dim: int):
    case = make_case(
        [(n, n) for n in (1, 700, 300, 1600)],
        dtype=dtype,
        head_dim=head_dim,
        group=4,
        device="cuda",
    )
    places = [0, 511, 512, 1023, 1024, 1599]
    compare(case, [0, 1, 7, 64, 400], places, batch_invariant_config(head_dim, dtype), (3, 264))


@pytest.mark.usefixtures("ordered_dot")
def test_what_other_tokens_of_a_tile_are_changes_no_bit(device: str):
    case = make_case([(64, 64)], group=2, device=device)
    whole, _, _ = run_parts(case, [(0, 0, 64)])
    case.q[1::2] = 1e4
    changed, _, _ = run_parts(case, [(0, 0, 64)])
    assert torch.equal(changed[::2], whole[::2])
