"""The benchmark of gated delta nets: its steps, its bytes, and that what it times is right."""

from __future__ import annotations

import pytest
import torch

from benchmarks.delta_net import layers as benchmark
from benchmarks.delta_net.bench_delta_net import KERNELS, check, line, planned
from benchmarks.delta_net.layers import SHAPES, error, exact, make_step
from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "KEY_HEADS", 2)
    monkeypatch.setattr(benchmark, "DIM", 16)


@pytest.mark.usefixtures("small")
def test_bytes_are_those_of_states_and_of_tokens():
    step = make_step(4, [1, 1, 1], 7, torch.float32, "cpu")
    conv_dim = 2 * 2 * 16 + 4 * 16
    inputs = 3 + 1  # of the convolution: read and written
    assert step.state_bytes == 3 * (2 * 4 * 16 * 16 * 4 + conv_dim * inputs * 2)
    assert step.token_bytes == 3 * 2 * (conv_dim + 2 * 4 * 16 + 2 * 4)
    found = {"rows": 3, "tokens": 1, "us": 2.0, "bytes": 4e6}
    text = line(found | {"fla": 4.0, "mul": 1.5, "all": {"4 warps": 3.0}}, 4.0)
    assert " 50 %" in text and "2.00 times as long" in text
    assert "mul_ 1.5" in text and "3.0  4 warps" in text


@pytest.mark.usefixtures("small")
def test_the_error_is_that_of_16_bits_and_shows_what_is_wrong():
    step = make_step(4, [70, 9], 7, torch.float32, "cpu")
    assert all(tensor.bool().any() for tensor in step.arguments[:4])
    found = check(step)
    assert 1e-4 < found[0] < 2e-2 and 0 < found[1] < 2e-2
    out, _ = exact(step)
    wrong = gated_delta_net(*step.arguments)
    wrong[3:5] = 0
    assert error(wrong, out) > 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_timed_is_right(shape: str, kernels: str):
    if kernels == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are for Hopper")
    for lens in ([1] * 9, [5] * 3, [700, 64]):
        step = planned(make_step(SHAPES[shape], lens, 100, torch.float32, "cuda"))
        assert max(check(step, KERNELS[kernels])) < 2e-2
