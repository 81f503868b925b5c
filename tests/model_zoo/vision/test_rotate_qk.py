"""The kernel that turns queries and keys gives what PyTorch's operations give."""

from __future__ import annotations

import os

import pytest
import torch

from model_zoo.layers.rope import rotate
from model_zoo.vision.rotate_qk import rotate_qk

CASES = [(1, 2, 8), (16, 3, 36), (37, 16, 72), (300, 4, 80)]  # patches, heads, values of a head


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=1 would interpret them")
    return torch.device(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_queries_and_keys_turn_and_values_stay(
    device: torch.device, case: tuple[int, int, int], dtype: torch.dtype
) -> None:
    count, heads, head_dim = case
    torch.manual_seed(1)
    qkv = torch.randn(count, 3, heads, head_dim, device=device).to(dtype)
    angles = 20 * torch.randn(count, head_dim // 2, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    expected = qkv.clone()
    for one in expected.unbind(1)[:2]:
        one.copy_(rotate(one.float(), cos_sin))
    rotate_qk(qkv, cos_sin)
    tolerance = 1e-6 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(qkv, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(qkv[:, 2], expected[:, 2])
