"""bench_layers without a GPU: every subject runs, and its variants compute the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.step.bench_layers import LayerShape, LayerSubject, shape_of, subjects

SHAPE = LayerShape("tiny", hidden=64, heads=4, kv_heads=2, head_dim=16, inner=128)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[LayerSubject]:
    monkeypatch.setattr("benchmarks.step.bench_layers.MAX_SETS", 2)
    return list(subjects(SHAPE, 3, torch.device("cpu")))


def test_subjects_count_what_is_read_and_written_once(prepared: list[LayerSubject]):
    """Of bfloat16: 8 heads of 16; a residual and what is added; 2 * 128 gates; 64 embedded."""
    expected = {"rope": 2 * 8 * 16, "add_norm": 4 * 64, "silu_mul": 3 * 128, "embed": 3 * 64 + 16}
    expected |= {"norm_fp8": 3.5 * 64, "gate_fp8": 2.5 * 128}
    assert {s.name: s.num_bytes for s in prepared} == {n: 3 * 2 * b for n, b in expected.items()}


def test_fused_kernels_and_separate_operations_make_the_same(prepared: list[LayerSubject]):
    for subject in prepared:
        expected = subject.separate(1)
        found = subject.fused(1)
        if found is None:  # in place
            continue
        pairs = zip(*[x if isinstance(x, tuple) else (x,) for x in (found, expected)], strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def test_every_variant_runs(prepared: list[LayerSubject]):
    calls = [call for subject in prepared for call in subject.variants.values()]
    assert calls
    for call in calls:
        call(0)


def test_shapes_are_those_of_the_other_benchmarks():
    assert shape_of("qwen3-8b") == LayerShape("qwen3-8b", 4096, 32, 8, 128, 12_288)
