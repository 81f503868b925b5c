"""The fixed kernel: right, and with the same bits whatever else a step holds."""

from __future__ import annotations

import random

import pytest
import torch
from attention_oracle import FP8, check, make_case
from fixed_runner import SMALL, Part, run, run_parts
from ordered_dot import ordered_dot  # noqa: F401

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [(1, 70), (1, 1), (5, 5), (3, 40), (0, 9), (1, 130), (33, 97)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{"programs": 1}, {"programs": 64, "units": 12}])
def test_it_equals_dense_attention(dtype, options, device: str):
    """With tiles whole, cut, and cut as far as there is room."""
    case = make_case(ROWS, dtype=dtype, group=3, device=device)
    check(case, *run(case, **options))


@pytest.mark.parametrize("programs", [1, 64])
def test_windows_soft_caps_and_sinks_are_kept_to(programs: int, device: str):
    case = make_case(ROWS, window=41, softcap=3.0, sinks=True, device=device)
    check(case, *run(case, programs=programs))


@pytest.mark.parametrize("programs", [1, 64])
def test_fp8_pages_and_odd_head_dims(programs: int, device: str):
    case = make_case(ROWS, kv_dtype=FP8, head_dim=80, page=32, device=device)
    check(case, *run(case, programs=programs))


def cuts(lengths: list[int], seed: int) -> list[list[Part]]:
    """Steps that feed all rows in chunks of random sizes, some side by side, until all are fed."""
    choose = random.Random(seed)
    fed = [0] * len(lengths)
    steps: list[list[Part]] = []
    while any(done < length for done, length in zip(fed, lengths, strict=True)):
        step: list[Part] = []
        for row in choose.sample(range(len(lengths)), len(lengths)):
            left = lengths[row] - fed[row]
            count = min(left, choose.choice([0, 1, 2, 19, 64]))
            if count:
                step.append((row, fed[row], fed[row] + count))
                fed[row] += count
        if step:
            steps.append(step)
    return steps


FEATURES = [
    *((dtype, {}) for dtype in DTYPES),
    (torch.bfloat16, {"window": 41, "softcap": 3.0, "sinks": True}),
    (torch.float16, {"kv_dtype": FP8}),
    (torch.float32, {"group": 5, "head_dim": 40}),
]


@pytest.mark.usefixtures("ordered_dot")
@pytest.mark.parametrize(("dtype", "features"), FEATURES, ids=str)
def test_a_token_has_the_same_bits_alone_and_in_every_chunk_and_batch(dtype, features, device: str):
    lengths = [70, 1, 99]
    case = make_case([(n, n) for n in lengths], dtype=dtype, **features, device=device)
    whole, lse, plan = run_parts(case, [(row, 0, n) for row, n in enumerate(lengths)], programs=1)
    assert int(plan.counts[1]) == 0, "nothing was cut"
    for seed, programs in enumerate((3, 64)):
        for step in cuts(lengths, seed):
            out, found, plan = run_parts(case, step, programs=programs)
            wanted = [
                slice(case.tokens(row).start + a, case.tokens(row).start + b) for row, a, b in step
            ]
            assert torch.equal(out, torch.cat([whole[part] for part in wanted])), step
            assert torch.equal(found, torch.cat([lse[part] for part in wanted])), step
    for place in (0, 31, 32, 64, 98):
        out, _, plan = run_parts(case, [(2, place, place + 1)], programs=64)
        assert torch.equal(out[0], whole[case.tokens(2)][place])
        if not case.window:
            assert int(plan.counts[1]) == (place >= SMALL.piece), "alone, a long row is cut"


@pytest.mark.usefixtures("ordered_dot")
def test_what_other_tokens_of_a_tile_are_changes_no_bit(device: str):
    case = make_case([(64, 64)], group=2, device=device)
    whole, _, _ = run_parts(case, [(0, 0, 64)])
    case.q[1::2] = 1e4
    changed, _, _ = run_parts(case, [(0, 0, 64)])
    assert torch.equal(changed[::2], whole[::2])
