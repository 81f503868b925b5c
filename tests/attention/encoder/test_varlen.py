"""Attention of packed sequences: each kernel against a float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attention.encoder.encoder_attention import encoder_attention
from attention.encoder.seqlens import Seqlens
from attention.encoder.varlen import VarlenConfig, varlen
from tests.support.attention.encoder_oracle import ROUNDING, error, make_qkv, oracle

SMALL = VarlenConfig(block_m=16, block_n=16, warps=4, stages=2)
LENS = [(1,), (16, 32), (5, 40, 1, 17), (1, 1, 1)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def kernel(qkv: Tensor, seqlens: Seqlens) -> Tensor:
    """Small tiles make several blocks of few rows, where the kernel is interpreted."""
    return varlen(qkv, seqlens, config=SMALL if qkv.device.type == "cpu" else None)


def sdpa(qkv: Tensor, seqlens: Seqlens) -> Tensor:
    return encoder_attention(qkv, seqlens, kernel="sdpa")


@pytest.mark.parametrize("lens", LENS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80])
@pytest.mark.parametrize("run", [kernel, sdpa])
def test_images_of_all_lengths_equal_the_oracle(
    device: str,
    run: Callable[[Tensor, Seqlens], Tensor],
    head_dim: int,
    lens: tuple[int, ...],
) -> None:
    qkv = make_qkv(lens, 2, head_dim, torch.float32, device)
    out = run(qkv, Seqlens.of(lens, qkv.device))
    assert out.shape == (sum(lens), 2, head_dim)
    # PyTorch's may multiply float32 in parts of TF32 on a GPU.
    assert error(out, oracle(qkv, lens)) <= (1e-4 if run is sdpa else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80])
def test_types_and_sizes_of_heads_err_by_their_rounding(
    device: str, head_dim: int, dtype: torch.dtype
) -> None:
    if device == "cuda" and dtype != torch.float32 and torch.cuda.get_device_capability() == (9, 0):
        pytest.skip("the kernel is not used there: ptxas loses the address of a matrix")
    lens = (19, 34)
    qkv = make_qkv(lens, 3, head_dim, dtype, device)
    out = kernel(qkv, Seqlens.of(lens, qkv.device))
    assert out.dtype == dtype
    assert error(out, oracle(qkv, lens)) <= ROUNDING[dtype]


def test_rows_at_a_stride_are_read_where_they_are(device: str) -> None:
    lens = (20, 7)
    wide = torch.full((27, 3 * 2 * 72 + 40), float("nan"), device=device)
    wide[:, : 3 * 2 * 72] = make_qkv(lens, 2, 72, torch.float32, device).flatten(1)
    qkv = wide[:, : 3 * 2 * 72].unflatten(1, (3, 2, 72))
    out = kernel(qkv, Seqlens.of(lens, qkv.device))
    assert error(out, oracle(qkv, lens)) <= 1e-5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, about NaN
def test_an_image_has_the_same_bits_whatever_stands_beside_it(device: str) -> None:
    """Not even NaN of one sequence reaches another."""
    lens = (9, 21, 16)
    qkv = make_qkv(lens, 2, 72, torch.float32, device)
    before = kernel(qkv, Seqlens.of(lens, qkv.device))
    qkv[:9], qkv[30:] = float("nan"), float("nan")
    after = kernel(qkv, Seqlens.of(lens, qkv.device))
    assert torch.equal(before[9:30], after[9:30])
    alone = kernel(qkv[9:30], Seqlens.of((21,), qkv.device))
    assert torch.equal(before[9:30], alone)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("count", [1, 15, 16, 17, 33, 48])
def test_padding_behind_the_last_sequence_changes_no_bit_of_it(device: str, count: int) -> None:
    """Not even NaN; the length is read on the device alone."""
    qkv = make_qkv((48,), 2, 72, torch.float32, device)
    alone = kernel(qkv[:count], Seqlens.of((count,), qkv.device))
    qkv[count:] = float("nan")
    seqlens = replace(Seqlens.of((count,), qkv.device), lens=(48,), padded=48)
    assert torch.equal(kernel(qkv, seqlens)[:count], alone)


def test_attention_that_takes_lengths_from_the_host_refuses_padding() -> None:
    qkv = make_qkv((20,), 1, 64, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="on the host"):
        encoder_attention(qkv, replace(Seqlens.of((7,), qkv.device), padded=20), kernel="sdpa")


def test_large_scores_neither_overflow_nor_vanish(device: str) -> None:
    lens = (33,)
    qkv = make_qkv(lens, 1, 72, torch.float32, device)
    qkv[:, :2] *= 40
    out = kernel(qkv, Seqlens.of(lens, qkv.device))
    assert error(out, oracle(qkv, lens)) <= 1e-4
