"""write_kv against plain torch indexing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from attention.common.write_kv import write_kv

FP8 = torch.float8_e4m3fn


def pages(dtype: torch.dtype, kv_heads: int, page: int, head_dim: int, device: str) -> Tensor:
    """[6, kv_heads, page, head_dim] of a number that no test stores."""
    return torch.full((6, kv_heads, page, head_dim), 77.0, device=device).to(dtype)


def some_slots(tokens: int, page: int, device: str) -> Tensor:
    return torch.randperm(6 * page)[:tokens].to(device)


def expected(new: Tensor, before: Tensor, slots: Tensor, scale: Tensor | None, page: int) -> Tensor:
    after = before.float().clone()
    for token, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        values = new[token].float()
        if scale is not None:
            values = (values / scale[:, None]).clamp(-448, 448)
        after[slot // page, :, slot % page] = values.to(before.dtype).float()
    return after


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "head_dim", "page"),
    [
        (torch.bfloat16, 8, 128, 16),
        (torch.float16, 1, 64, 128),
        (torch.float32, 3, 80, 32),
        (torch.bfloat16, 5, 256, 64),
        (torch.float32, 2, 96, 16),
        (torch.float16, 12, 192, 16),
    ],
)
def test_each_token_lands_in_its_slot_and_nothing_else_changes(
    device: str, dtype: torch.dtype, kv_heads: int, head_dim: int, page: int
):
    torch.manual_seed(0)
    new_k, new_v = torch.randn(2, 9, kv_heads, head_dim, device=device).to(dtype)
    k, v = (pages(dtype, kv_heads, page, head_dim, device) for _ in range(2))
    slots = some_slots(9, page, device)
    references = [expected(new, pool, slots, None, page) for new, pool in ((new_k, k), (new_v, v))]
    write_kv(new_k, new_v, k, v, slots)
    assert torch.equal(k.float(), references[0]) and torch.equal(v.float(), references[1])


def test_tokens_may_be_views_of_one_projection_and_pages_views_of_one_tensor(device: str):
    torch.manual_seed(1)
    heads, kv_heads, head_dim, page = 4, 2, 64, 16
    qkv = torch.randn(7, heads + 2 * kv_heads, head_dim, device=device)
    _, new_k, new_v = qkv.split([heads, kv_heads, kv_heads], 1)
    both = torch.zeros(6, page, 2, kv_heads, head_dim, device=device)  # K and V side by side
    k, v = both.permute(2, 0, 3, 1, 4).unbind()
    slots = some_slots(7, page, device)
    references = [expected(new, pool, slots, None, page) for new, pool in ((new_k, k), (new_v, v))]
    write_kv(new_k, new_v, k, v, slots)
    assert torch.equal(k, references[0]) and torch.equal(v, references[1])


def test_a_negative_slot_is_skipped(device: str):
    new = torch.randn(4, 2, 64, device=device)
    k, v = (pages(torch.float32, 2, 16, 64, device) for _ in range(2))
    slots = torch.tensor([-1, 5, -(2**40), 17], device=device)
    references = expected(new, k, slots, None, 16)
    write_kv(new, new, k, v, slots)
    assert torch.equal(k, references) and torch.equal(v, references)


def test_nothing_to_write_is_no_error(device: str):
    k, v = (pages(torch.float32, 2, 16, 64, device) for _ in range(2))
    new = torch.zeros(0, 2, 64, device=device)
    write_kv(new, new, k, v, torch.zeros(0, dtype=torch.int64, device=device))
    assert (k == 77).all()


def fp8_numbers(*shape: int, device: str) -> Tensor:
    """Random numbers that e4m3 holds exactly, NaN left out."""
    bits = torch.randint(0, 127, shape, dtype=torch.uint8)
    sign = torch.where(torch.rand(shape) < 0.5, -1.0, 1.0)
    return (bits.view(FP8).float() * sign).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_pages_hold_value_over_scale_of_each_head(device: str, dtype: torch.dtype):
    torch.manual_seed(2)
    k, v = (pages(FP8, 3, 16, 80, device) for _ in range(2))
    stored_k, stored_v = fp8_numbers(2, 5, 3, 80, device=device)
    k_scale = torch.tensor([0.5, 1.0, 0.125], device=device)
    v_scale = torch.tensor([2.0, 0.25, 8.0], device=device)
    new_k, new_v = stored_k * k_scale[:, None], stored_v * v_scale[:, None]
    slots = some_slots(5, 16, device)
    wanted_k = expected(stored_k, k, slots, None, 16)
    wanted_v = expected(stored_v, v, slots, None, 16)
    write_kv(new_k.to(dtype), new_v.to(dtype), k, v, slots, k_scale, v_scale)
    assert torch.equal(k.float(), wanted_k) and torch.equal(v.float(), wanted_v)


def test_fp8_cuts_what_is_too_large(device: str):
    special = torch.tensor([449.0, -1e30, float("inf"), float("-inf"), 448.0, -0.0])
    new = torch.zeros(1, 1, 64, device=device)
    new[0, 0, :6] = special.to(device)
    k, v = (pages(FP8, 1, 16, 64, device) for _ in range(2))
    one = torch.ones(1, device=device)
    write_kv(new, new, k, v, torch.tensor([3], device=device), one, one)
    references = torch.tensor([448.0, -448.0, 448.0, -448.0, 448.0, -0.0])
    for pool in (k, v):
        assert torch.equal(pool[0, 0, 3, :6].float().cpu(), references)


@pytest.mark.gpu  # the interpreter neither rounds e4m3 nor knows its NaN
def test_fp8_rounds_to_nearest_and_keeps_nan():
    torch.manual_seed(3)
    device = "cuda"
    new = torch.randn(64, 4, 128, device=device)
    new *= torch.logspace(-4, 4, 64, device=device)[:, None, None]
    new[5, 2, 9] = float("nan")
    scale = torch.tensor([0.7, 1.0, 0.013, 3e-3], device=device)
    k, v = (pages(FP8, 4, 16, 128, device) for _ in range(2))
    slots = some_slots(64, 16, device)
    references = expected(new, k, slots, scale, 16)
    write_kv(new, new, k, v, slots, scale, scale)
    for pool in (k, v):
        torch.testing.assert_close(pool.float(), references, rtol=0, atol=0, equal_nan=True)
    assert references.isnan().sum() == 1


@pytest.mark.parametrize(("dtype", "has_scales"), [*product([torch.float32, FP8], [True, False])])
def test_scales_are_for_fp8_pages_and_fp8_pages_need_them(
    device: str, dtype: torch.dtype, has_scales: bool
):
    k, v = (pages(dtype, 1, 16, 64, device) for _ in range(2))
    new, slots = torch.ones(1, 1, 64, device=device), torch.tensor([0], device=device)
    scales = [torch.ones(1, device=device)] * 2 if has_scales else []
    if has_scales == (dtype == FP8):
        write_kv(new, new, k, v, slots, *scales)
        assert (k[0, 0, 0].float() == 1).all()
    else:
        with pytest.raises(AssertionError, match="scales"):
            write_kv(new, new, k, v, slots, *scales)
