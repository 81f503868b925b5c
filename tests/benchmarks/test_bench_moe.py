"""The benchmark of experts: its routings, its floor, and that what it times is right."""

from __future__ import annotations

import pytest
import torch

from benchmarks.moe.bench_moe import (
    FORMATS,
    SHAPES,
    Case,
    balanced,
    check,
    make_layers,
    scheme,
    zipf,
)
from model_zoo.layers.moe.experts import Experts
from tests.support.kernels.expert_cases import make_experts


def some_experts() -> Experts:
    return make_experts(
        num_experts=16, top_k=4, hidden=32, inner=16, dtype=torch.bfloat16, device="cpu"
    )


@pytest.mark.parametrize("tokens", [1, 4, 10, 200])
def test_balanced_routing_uses_as_many_experts_as_there_can_be(tokens: int):
    ids = balanced(some_experts(), tokens, "cpu")
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = ids.flatten().long().bincount(minlength=16)
    assert int(counts.max() - counts.min()) <= 1


def test_zipf_routing_prefers_few_experts():
    ids = zipf(some_experts(), 500, "cpu")
    assert all(len(set(row)) == 4 for row in ids.tolist())
    counts = ids.flatten().long().bincount(minlength=16).sort(descending=True).values
    assert counts[0] > 300 and counts[-1] < 100


def test_the_floor_counts_the_chosen_experts_or_the_operations():
    experts = some_experts()
    case = Case([experts], bandwidth=1.0, tflops=1e9)
    ids = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]], dtype=torch.int32)
    assert case.floor(ids) == pytest.approx(4 * 3 * 32 * 16 * 2)
    slow = Case([experts], bandwidth=1e12, tflops=1e-6)
    assert slow.floor(ids) == pytest.approx(6 * 8 * 32 * 16)


def test_every_format_and_shape_has_a_scheme_that_its_layers_take():
    for kind in FORMATS:
        found = scheme(kind, 2048)
        assert (found is None) == (kind == "bf16")
    assert all(hidden % 64 == 0 for hidden, _ in SHAPES.values())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_what_is_timed_is_right(kind: str):
    layers = make_layers("qwen3-30b-a3b", kind, 1, "cuda")
    case = Case(layers, 4.3e6, 800.0)
    for tokens in (1, 8, 32, 300):
        x = torch.randn(tokens, layers[0].hidden, device="cuda").bfloat16()
        weights = torch.full((tokens, layers[0].top_k), 0.125, device="cuda")
        ids = zipf(layers[0], tokens, "cuda")
        assert check(case, tokens, x, ids, weights) < 0.1
