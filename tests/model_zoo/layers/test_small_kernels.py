"""The small fused kernels of a layer against the operations of PyTorch that they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model_zoo.layers.embedding import Embedding
from model_zoo.layers.kernels.add_rms_norm import add_rms_norm, norm_of_sum
from model_zoo.layers.kernels.embed import embed, embed_own
from model_zoo.layers.kernels.sigmoid_mul import sigmoid_mul
from model_zoo.layers.kernels.silu_mul import gelu_tanh_mul, silu_mul
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Rope
from model_zoo.rope_config import RopeConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [pytest.param(BF16, marks=pytest.mark.gpu), FP16, FP32]
DIGIT = {FP32: 2e-6, FP16: 2**-10, BF16: 2**-7}  # a last digit, of the largest mantissa


def norm_of(size: int, dtype: torch.dtype, device: str, *, plus_one: bool = False) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, dtype, plus_one=plus_one)
    norm.weight.normal_(0 if plus_one else 1, 0.1)
    return norm.to(device)


@pytest.mark.parametrize("size", [64, 96, 1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum_is_exact_and_its_norm_differs_in_a_last_digit(
    device: str, dtype: torch.dtype, size: int
):
    torch.manual_seed(0)
    norm = norm_of(size, dtype, device)
    x, residual = (torch.randn(3, size, device=device).to(dtype) for _ in range(2))
    total = residual + x
    expected = norm(total)
    add_rms_norm(x, residual, norm.weight, norm.eps)
    assert torch.equal(residual, total)
    torch.testing.assert_close(x, expected, rtol=2 * DIGIT[dtype], atol=0)
    assert (x == expected).float().mean() > (0.98 if dtype != FP32 else 0.3)


@pytest.mark.parametrize("size", [96, 1000, 4096])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_of_a_sum_has_the_bits_that_it_has_where_it_is_summed(
    device: str, dtype: torch.dtype, size: int
):
    torch.manual_seed(2)
    norm = norm_of(size, dtype, device)
    wide = torch.randn(3, 2 * size, device=device).to(dtype)
    x, residual = (torch.randn(3, size, device=device).to(dtype) for _ in range(2))
    wide[:, :size] = residual + x
    before = wide.clone()
    found = norm_of_sum(wide[:, :size], norm.weight, norm.eps)
    add_rms_norm(x, residual, norm.weight, norm.eps)
    assert torch.equal(found, x) and torch.equal(wide, before)
    assert norm_of_sum(wide[:0, :size], norm.weight, norm.eps).shape == (0, size)


@pytest.mark.parametrize("size", [64, 96, 1152])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_by_weight_plus_one_add_it_in_fp32_and_round_once(
    device: str, dtype: torch.dtype, size: int
):
    torch.manual_seed(4)
    norm = norm_of(size, dtype, device, plus_one=True)
    x, residual = (torch.randn(3, size, device=device).to(dtype) for _ in range(2))
    total = residual + x
    wide = total.double()
    wide = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    exact = wide * (1 + norm.weight.double())
    # Not twice rounded: half a last digit, and the error of fp32 within.
    torch.testing.assert_close(norm(total).double(), exact, rtol=0.51 * DIGIT[dtype] + 1e-6, atol=0)
    alone = norm_of_sum(total, norm.weight, norm.eps, plus_one=True)
    add_rms_norm(x, residual, norm.weight, norm.eps, plus_one=True)
    assert torch.equal(residual, total) and torch.equal(x, alone)
    torch.testing.assert_close(x.double(), exact, rtol=0.51 * DIGIT[dtype] + 1e-6, atol=0)


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize("size", [96, 1152])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_added_may_be_normed_before(
    device: str, dtype: torch.dtype, size: int, plus_one: bool
):
    torch.manual_seed(5)
    norm, post = (norm_of(size, dtype, device, plus_one=plus_one) for _ in range(2))
    x, residual = (4 * torch.randn(3, size, device=device).to(dtype) for _ in range(2))
    total = residual + post(x)
    add_rms_norm(x, residual, norm.weight, norm.eps, post_weight=post.weight, plus_one=plus_one)
    near = {"rtol": 2 * DIGIT[dtype], "atol": 8 * DIGIT[dtype]}  # of the sum's largest terms
    torch.testing.assert_close(residual, total, **near)
    torch.testing.assert_close(x, norm(residual), rtol=2 * DIGIT[dtype], atol=0)


@pytest.mark.parametrize("num_warps", [1, 8])
def test_rows_of_sums_may_lie_apart(device: str, num_warps: int):
    torch.manual_seed(1)
    norm = norm_of(320, FP16, device)
    wide = torch.randn(2, 4, 400, device=device, dtype=FP16)
    x, residual = wide[:, :, :320]
    total, outside = residual + x, wide[:, :, 320:].clone()
    add_rms_norm(x, residual, norm.weight, norm.eps, num_warps=num_warps)
    torch.testing.assert_close(x, norm(total), rtol=2 * DIGIT[FP16], atol=0)
    assert torch.equal(residual, total) and torch.equal(wide[:, :, 320:], outside)


@pytest.mark.filterwarnings("ignore:overflow")  # of numpy, for a gate of -100
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("size", [24, 1024, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_is_that_of_separate_operations(
    device: str, dtype: torch.dtype, size: int, gelu: bool
):
    torch.manual_seed(2)
    gate_up = (4 * torch.randn(3, 2 * size + 8, device=device)).to(dtype)[:, : 2 * size]
    gate_up[0, :4] = torch.tensor([0.0, -100.0, 100.0, -0.0])
    gate, up = gate_up.chunk(2, -1)
    if gelu:  # 1 + tanh(z) loses all digits where the gate is far below 0
        expected, found = F.gelu(gate, approximate="tanh") * up, gelu_tanh_mul(gate_up)
        torch.testing.assert_close(found, expected, rtol=2 * DIGIT[dtype], atol=4e-6)
    else:
        expected, found = F.silu(gate) * up, silu_mul(gate_up)
        torch.testing.assert_close(found, expected, rtol=2 * DIGIT[dtype], atol=1e-30)
    assert found.is_contiguous() and found.isfinite().all()


def embedded(tokens: Tensor, positions: Tensor, rope: Rope, norm: RMSNorm, embeddings: Tensor):
    ropes = [(rope.frequencies, rope.scale)]
    x, residual, (cos_sin,) = embed(tokens, positions, embeddings, norm.weight, norm.eps, ropes)
    return x, residual, cos_sin


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 200])
def test_embeddings_are_copied_and_normed(device: str, dtype: torch.dtype, size: int):
    norm = norm_of(size, dtype, device)
    embeddings = torch.randn(50, size, device=device).to(dtype)
    tokens = torch.tensor([49, 0, 0, 17], device=device)
    rope = Rope(RopeConfig(), 24).to(device)
    x, residual, _ = embedded(tokens, torch.zeros_like(tokens), rope, norm, embeddings)
    assert torch.equal(residual, embeddings[tokens])
    torch.testing.assert_close(x, norm(residual), rtol=2 * DIGIT[dtype], atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_embeddings_are_scaled_and_rounded_before_their_norm(device: str, dtype: torch.dtype):
    norm = norm_of(200, dtype, device, plus_one=True)
    table = Embedding(50, 200, dtype, scale=200**0.5)
    assert table.scale == torch.tensor(200**0.5).to(dtype).item()
    table.weight.normal_()
    table = table.to(device)
    tokens = torch.tensor([49, 0, 0, 17], device=device)
    ropes = [(rope.frequencies, rope.scale) for rope in [Rope(RopeConfig(), 24).to(device)]]
    x, residual, _ = embed(
        tokens, tokens, table.weight, norm.weight, norm.eps, ropes, embedding_scale=table.scale,
        plus_one=True,
    )  # fmt: skip
    assert torch.equal(residual, table(tokens))
    torch.testing.assert_close(x, norm(residual), rtol=2 * DIGIT[dtype], atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_of_other_ranks_tokens_there_are_zeros(device: str, dtype: torch.dtype):
    table = torch.randn(20, 200, device=device).to(dtype)
    tokens = torch.tensor([49, 30, 0, 29, 50], device=device)
    rope = Rope(RopeConfig(), 24).to(device)
    pairs = [(rope.frequencies, rope.scale)]
    own, zeros, [cos_sin] = embed_own(tokens, tokens, table, (30, 50), pairs, embedding_scale=0.5)
    expected = torch.zeros(5, 200, device=device, dtype=dtype)
    expected[0], expected[1] = table[19] * 0.5, table[0] * 0.5
    assert torch.equal(own, expected) and not zeros.any() and zeros.shape == own.shape
    torch.testing.assert_close(cos_sin, rope.rows(tokens, dtype), rtol=2 * DIGIT[dtype], atol=4e-6)


def test_two_ropes_have_their_own_frequencies_and_factors(device: str):
    ropes = [Rope(RopeConfig(theta=theta), 24).to(device) for theta in (1e4, 1e6)]
    ropes[1].scale = 1.25
    positions = torch.tensor([0, 3, 70_000], device=device)
    norm, table = norm_of(16, FP32, device), torch.zeros(1, 16, device=device)
    pairs = [(rope.frequencies, rope.scale) for rope in ropes]
    none = torch.zeros_like(positions)
    _, _, both = embed(none, positions, table, norm.weight, norm.eps, pairs)
    for rope, found in zip(ropes, both, strict=True):
        torch.testing.assert_close(found, rope.rows(positions, FP32), rtol=0, atol=4e-7)
    assert not torch.equal(both[0], both[1])


def rotations(positions: Tensor, rope: Rope, dtype: torch.dtype) -> Tensor:
    """By the kernel, whose embeddings do not matter here."""
    device = str(positions.device)
    embeddings = torch.zeros(1, 16, device=device, dtype=dtype)
    none = torch.zeros_like(positions)
    return embedded(none, positions, rope, norm_of(16, dtype, device), embeddings)[2]


@pytest.mark.parametrize(("head_dim", "scale"), [(64, 1.0), (24, 1.25), (256, 1.0)])
def test_rotations_are_right_in_fp32_at_positions_of_a_million(
    device: str, head_dim: int, scale: float
):
    """Against float64, of the same float32 angles; and as PyTorch has them in fp32."""
    rope = Rope(RopeConfig(theta=1e4), head_dim).to(device)
    rope.scale = scale
    positions = torch.tensor([0, 1, 777, 131_071, 999_983, 1_048_575, 16_777_215], device=device)
    found = rotations(positions, rope, FP32)
    angles = (positions[:, None].float() * rope.frequencies).double()
    expected = torch.cat([angles.cos(), angles.sin()], -1) * scale
    assert (found.double() - expected).abs().max() < 3e-7
    assert (found - rope.rows(positions, FP32)).abs().max() < 3e-7


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_rotations_are_rounded_once(device: str, dtype: torch.dtype):
    rope = Rope(RopeConfig(), 64).to(device)
    positions = torch.arange(0, 5000, 500, device=device)
    found, expected = rotations(positions, rope, dtype), rope.rows(positions, dtype)
    assert (found == expected).float().mean() > 0.98
    torch.testing.assert_close(found, expected, rtol=DIGIT[dtype], atol=2**-14)


@pytest.mark.parametrize("size", [96, 4096])
def test_a_row_has_the_same_bits_alone_and_among_others(device: str, size: int):
    torch.manual_seed(3)
    rows = 300 if device == "cuda" else 5
    norm = norm_of(size, FP16, device)
    x, residual = torch.randn(2, rows, size, device=device).to(FP16)
    alone, alone_residual = x[3:4].clone(), residual[3:4].clone()
    add_rms_norm(x, residual, norm.weight, norm.eps)
    add_rms_norm(alone, alone_residual, norm.weight, norm.eps)
    assert torch.equal(alone, x[3:4])
    assert torch.equal(silu_mul(x)[3:4], silu_mul(alone))


@pytest.mark.parametrize("heads", [1, 3, 9])
@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gate_of_attention_is_a_sigmoid(
    device: str, dtype: torch.dtype, heads: int, chosen: bool
):
    """Of gates between queries, for all tokens or for those of some rows."""
    torch.manual_seed(4)
    both = torch.randn(5, heads, 2 * 160, device=device).to(dtype)
    gates, before = both[..., 160:], both.clone()
    rows = torch.tensor([4, 0, 2], device=device) if chosen else None
    x = torch.randn(3 if chosen else 5, heads, 160, device=device).to(dtype)
    picked = gates if rows is None else gates[rows]
    expected = (x.float() * picked.float().sigmoid()).to(dtype)
    torch.testing.assert_close(sigmoid_mul(x, gates, rows), expected, rtol=DIGIT[dtype], atol=1e-7)
    assert torch.equal(both, before)


def test_no_tokens_are_no_error(device: str):
    none = torch.zeros(0, dtype=torch.int64, device=device)
    empty, norm = torch.zeros(0, 32, device=device), norm_of(32, FP32, device)
    rope = Rope(RopeConfig(), 16).to(device)
    x, residual, cos_sin = embedded(none, none, rope, norm, torch.zeros(2, 32, device=device))
    assert x.shape == residual.shape == (0, 32) and cos_sin.shape == (0, 16)
    add_rms_norm(empty, empty, norm.weight, norm.eps)
    assert silu_mul(empty).shape == (0, 16)
