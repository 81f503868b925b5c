"""qk_norm_rope_write against the operations of PyTorch that it replaces."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from attention.kv_pool import FP8, KVPool
from model_zoo.layers.kernels.qk_norm_rope_write import (
    FEW_TOKENS,
    QKNormRopeConfig,
    qk_norm_rope_write,
)
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.rope import Rope, rotate
from model_zoo.rope_config import RopeConfig

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PAGES, UNWRITTEN = 5, 77.0  # a number that no test stores
# Of fp32, sums in another order; of the others, that as a last digit, and what follows from it.
# For bfloat16 more, as the interpreter cuts it off where a GPU rounds.
NEAR = {FP32: 2e-6, FP16: 2e-3, BF16: 3e-2}


@dataclass
class RopeCase:
    """One layer's shape; `norm` and `apply_rope` say what is done to queries and keys."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page: int = 16
    dtype: torch.dtype = FP32
    norm: bool = True
    plus_one: bool = False
    partial: float = 1.0
    gated: bool = False
    apply_rope: bool = True
    tokens: int = 5

    def make(self, device: str) -> None:
        torch.manual_seed(0)
        columns = (self.heads * (1 + self.gated) + 2 * self.kv_heads) * self.head_dim
        wide = torch.randn(self.tokens, columns + 8, dtype=self.dtype, device=device)
        self.qkv = wide[:, :columns]  # rows further apart than they are long
        norms = [RMSNorm(self.head_dim, 1e-6, self.dtype, plus_one=self.plus_one) for _ in range(2)]
        for norm in norms:
            norm.weight.normal_(0 if self.plus_one else 1, 0.1)
        self.q_norm, self.k_norm = (norm.to(device) for norm in norms)
        self.cos_sin = None
        if self.apply_rope:
            positions = torch.randint(0, 40_000, (self.tokens,), device=device)
            rope = Rope(RopeConfig(theta=1e6, partial=self.partial), self.head_dim).to(device)
            self.cos_sin = rope.rows(positions, self.dtype)
        self.slots = torch.randperm(PAGES * self.page)[: self.tokens].to(device)

    def pool(self, device: str, dtype: torch.dtype | None = None) -> KVPool:
        kv = KVPool.allocate(
            layers=2, pages=PAGES, kv_heads=self.kv_heads, page_size=self.page,
            head_dim=self.head_dim, dtype=dtype or self.dtype, device=torch.device(device),
        )  # fmt: skip
        for pages in (kv.k, kv.v):
            pages.copy_(torch.full((), UNWRITTEN).to(pages.dtype).expand_as(pages))
        return kv

    def expected_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [T, heads, head_dim] as PyTorch's operations make them."""
        heads = self.qkv.reshape(self.tokens, -1, self.head_dim)
        queries = self.heads * (1 + self.gated)
        q, k, v = heads.split([queries, self.kv_heads, self.kv_heads], 1)
        q = q[:, :: 1 + self.gated]
        if self.norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.cos_sin is not None:
            q, k = rotate(q, self.cos_sin), rotate(k, self.cos_sin)
        return q, k, v

    def run(self, kv: KVPool, config: QKNormRopeConfig | None = None) -> Tensor:
        k_scale, v_scale = kv.layers[1].k_scale, kv.layers[1].v_scale
        return qk_norm_rope_write(
            self.qkv, kv.k[1], kv.v[1], self.slots, heads=self.heads, gated=self.gated,
            cos_sin=self.cos_sin,
            q_weight=self.q_norm.weight if self.norm else None,
            k_weight=self.k_norm.weight if self.norm else None,
            eps=1e-6, plus_one=self.plus_one, k_scale=k_scale, v_scale=v_scale, config=config,
        )  # fmt: skip

    def stored(self, pages: Tensor) -> Tensor:
        """[T, kv_heads, head_dim] at the tokens' slots."""
        return pages[1, self.slots // self.page, :, self.slots % self.page]


CASES = {
    "norm and rotation": RopeCase(dtype=BF16, head_dim=128),
    "no norm": RopeCase(dtype=BF16, norm=False, heads=8, kv_heads=1, page=64),
    "no rotation": RopeCase(dtype=FP16, apply_rope=False, head_dim=96, page=128),
    "the write alone": RopeCase(
        dtype=BF16, norm=False, apply_rope=False, heads=3, kv_heads=3, head_dim=80
    ),
    "wide heads": RopeCase(head_dim=256, heads=2, kv_heads=2),
    "heads that fill no tile": RopeCase(heads=15, kv_heads=5, head_dim=64, dtype=FP16, page=32),
    "narrow heads": RopeCase(heads=4, kv_heads=1, head_dim=24, dtype=FP32),
    "half of a head rotated": RopeCase(dtype=BF16, head_dim=128, partial=0.5),
    "a quarter rotated": RopeCase(dtype=FP16, head_dim=80, partial=0.25, norm=False, page=32),
    "most rotated": RopeCase(head_dim=64, partial=0.75, heads=3, kv_heads=3),
    "fp32": RopeCase(head_dim=128, heads=6, kv_heads=3),
    "weights plus one": RopeCase(head_dim=256, heads=2, kv_heads=1, plus_one=True),
    "a quarter rotated, with gates": RopeCase(
        head_dim=256, heads=6, kv_heads=2, plus_one=True, partial=0.25, gated=True, dtype=BF16
    ),
    "gates": RopeCase(head_dim=64, gated=True, heads=5),
    "weights plus one in half": RopeCase(head_dim=24, dtype=FP16, plus_one=True),
}


def near(found: Tensor, expected: Tensor) -> bool:
    dtype = expected.dtype
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= NEAR[dtype] * expected.double().abs().max())


@pytest.mark.parametrize("name", CASES)
def test_queries_and_stored_keys_and_values_are_those_of_separate_operations(
    device: str, name: str
):
    case = CASES[name]
    case.make(device)
    kv = case.pool(device)
    q, k, v = (part.clone() for part in case.expected_heads())
    assert near(case.run(kv), q)
    assert near(case.stored(kv.k), k) and torch.equal(case.stored(kv.v), v)
    # Nothing else is written, in this layer or the other.
    for pages in (kv.k, kv.v):
        assert (pages != UNWRITTEN).sum() <= v.numel()


@pytest.mark.parametrize("dtype", [FP32, FP16, pytest.param(BF16, marks=pytest.mark.gpu)])
def test_rotation_alone_is_equal_to_the_bit(device: str, dtype: torch.dtype):
    case = RopeCase(dtype=dtype, norm=False, head_dim=128)
    case.make(device)
    kv = case.pool(device)
    q, k, _ = (part.clone() for part in case.expected_heads())
    assert torch.equal(case.run(kv), q) and torch.equal(case.stored(kv.k), k)


@pytest.mark.parametrize(
    "config", [QKNormRopeConfig(1, 1), QKNormRopeConfig(2, 1), QKNormRopeConfig(16, 4)]
)
def test_every_tile_of_heads_gives_the_same_bits(device: str, config: QKNormRopeConfig):
    case = RopeCase(dtype=BF16, heads=12, kv_heads=3)
    case.make(device)
    kv, other = case.pool(device), case.pool(device)
    before = case.qkv.clone()
    first = case.run(kv).clone()
    case.qkv.copy_(before)
    assert torch.equal(case.run(other, config), first)
    assert torch.equal(kv.k, other.k) and torch.equal(kv.v, other.v)


def test_a_token_has_the_same_bits_alone_and_among_many(device: str):
    """Of which the kernel makes larger programs."""
    case = RopeCase(dtype=FP16, heads=2, kv_heads=1, head_dim=32, page=64, tokens=FEW_TOKENS + 1)
    case.make(device)
    alone = replace(case, tokens=1)
    alone.make(device)
    alone.qkv.copy_(case.qkv[7:8])
    alone.q_norm, alone.k_norm = case.q_norm, case.k_norm
    assert case.cos_sin is not None
    alone.cos_sin, alone.slots = case.cos_sin[7:8], case.slots[7:8]
    kv, kv_alone = case.pool(device), case.pool(device)
    queries, query = case.run(kv), alone.run(kv_alone)
    assert torch.equal(queries[7:8], query)
    assert torch.equal(case.stored(kv.k)[7:8], alone.stored(kv_alone.k))


def test_padding_tokens_are_not_stored(device: str):
    case = RopeCase(dtype=BF16)
    case.make(device)
    case.slots[1], case.slots[3] = -1, -(2**40)
    kv = case.pool(device)
    _, _, v = case.expected_heads()
    case.run(kv)
    real = case.slots >= 0
    case.slots = case.slots[real]
    assert torch.equal(case.stored(kv.v), v[real])
    assert (kv.v != UNWRITTEN).sum() <= v[real].numel()
    assert (kv.k != UNWRITTEN).sum() <= v[real].numel()


def test_gates_stay_as_they_are(device: str):
    case = RopeCase(gated=True, partial=0.25, heads=3)
    case.make(device)
    gates = case.qkv[:, : 6 * case.head_dim].unflatten(1, (3, -1))[..., case.head_dim :]
    before = gates.clone()
    queries = case.qkv[:, : case.head_dim].clone()
    case.run(case.pool(device))
    assert torch.equal(gates, before)
    assert not torch.equal(case.qkv[:, : case.head_dim], queries)


def test_columns_beyond_the_gemm_stay_as_they_are(device: str):
    case = RopeCase(dtype=FP32)
    case.make(device)
    outside = case.qkv._base[:, case.qkv.shape[1] :]  # type: ignore[index]
    before, after_queries = outside.clone(), case.qkv[:, case.heads * case.head_dim :].clone()
    case.run(case.pool(device))
    assert torch.equal(outside, before)
    assert torch.equal(case.qkv[:, case.heads * case.head_dim :], after_queries)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_fp8_pages_hold_value_over_scale_of_each_head(device: str, dtype: torch.dtype):
    """Of numbers that e4m3 holds exactly: the interpreter does not round it."""
    case = RopeCase(dtype=dtype, norm=False, apply_rope=False, heads=2, kv_heads=3, head_dim=80)
    case.make(device)
    kv = case.pool(device, FP8)
    assert kv.k_scale is not None and kv.v_scale is not None
    kv.k_scale[1] = torch.tensor([0.5, 1.0, 0.125])
    kv.v_scale[1] = torch.tensor([2.0, 0.25, 8.0])
    numbers = torch.randint(0, 127, (2, case.tokens, 3, 80), dtype=torch.uint8).view(FP8).float()
    k, v = numbers.to(device)
    scaled = [k * kv.k_scale[1][:, None], v * kv.v_scale[1][:, None]]
    case.qkv[:, 160:] = torch.cat([part.flatten(1) for part in scaled], 1)
    case.run(kv)
    assert torch.equal(case.stored(kv.k).float(), k)
    assert torch.equal(case.stored(kv.v).float(), v)


@pytest.mark.gpu
def test_fp8_keys_are_rounded_from_the_turned_keys():
    case = RopeCase(dtype=BF16, norm=False, head_dim=128, tokens=300, page=128)
    case.make("cuda")
    kv = case.pool("cuda", FP8)
    assert kv.k_scale is not None
    kv.k_scale[1] = torch.tensor([0.013, 0.7])
    _, k, v = (part.clone() for part in case.expected_heads())
    case.run(kv)
    scaled = k.float() / kv.k_scale[1][:, None]
    assert torch.equal(case.stored(kv.k).float(), scaled.clamp(-448, 448).to(FP8).float())
    assert torch.equal(case.stored(kv.v).float(), v.to(FP8).float())


def test_no_tokens_are_no_error(device: str):
    case = RopeCase(tokens=0)
    case.make(device)
    assert case.run(case.pool(device)).shape == (0, 4, 64)
