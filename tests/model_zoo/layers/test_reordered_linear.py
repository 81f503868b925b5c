"""GEMMs with reordered weights on a CPU: few numbers of rows, and the same results as without."""

from __future__ import annotations

import pytest
import torch

from model_zoo.layers.linear import Linear, cpu_reorders, padded_rows


def test_gemms_of_reordered_weights_run_with_few_numbers_of_rows():
    """oneDNN compiles a kernel for each, and keeps them: memory grew by hundreds of MiB."""
    numbers = {rows: padded_rows(rows) for rows in range(1, 8193)}
    assert len(set(numbers.values())) < 100
    assert all(rows <= padded <= rows * 9 / 8 for rows, padded in numbers.items())
    assert all(padded == rows for rows, padded in numbers.items() if rows <= 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 100])
def test_a_reordered_layer_computes_what_the_plain_one_does(dtype: torch.dtype, rows: int):
    if not cpu_reorders(dtype):
        pytest.skip(f"oneDNN reorders no {dtype} on this CPU")
    torch.manual_seed(0)
    layer = Linear(64, 32, bias=True, dtype=dtype)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(rows, 64, dtype=dtype)
    expected = layer(x)
    layer.prepare()
    assert layer._reordered is not None
    torch.testing.assert_close(layer(x), expected)


def test_a_reordered_layer_hands_no_other_number_of_rows_to_onednn(monkeypatch: pytest.MonkeyPatch):
    seen: list[int] = []
    layer = Linear(64, 32, bias=False, dtype=torch.float32)
    layer.prepare()
    gemm = layer._reordered_gemm
    monkeypatch.setattr(layer, "_reordered_gemm", lambda x: (seen.append(len(x)), gemm(x))[1])
    if layer._reordered is None:
        pytest.skip("oneDNN reorders no float32 on this CPU")
    for rows in range(1, 200):
        assert len(layer(torch.zeros(rows, 64))) == rows
    assert seen == [padded_rows(rows) for rows in range(1, 200)]
