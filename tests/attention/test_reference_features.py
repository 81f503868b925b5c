"""The reference back end's windows, soft caps, sinks, sums and fp8 against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from attention.reference import ReferenceBackend
from tests.support.attention.attention_oracle import FP8, OracleCase, check, make_case
from tests.support.attention.backend_step import meta_of, pool_of

DECODING = [(1, 70), (1, 1), (1, 16), (1, 33), (1, 0)]
ROWS = [*DECODING, (5, 5), (0, 9), (3, 40), (1, 21), (0, 0), (2, 17)]


def run(case: OracleCase) -> None:
    backend, kv = ReferenceBackend(), pool_of(case)
    meta = backend.plan(meta_of(case), kv)
    _, lse = case.results()
    options = dict(scale=case.scale, window=case.window, softcap=case.softcap, sinks=case.sinks)
    out = backend.attend(case.q, kv.layers[0], meta, **options, lse=lse)
    # Its matmuls are in the dtype: a bfloat16 sum is not as good as a kernel's.
    check(case, out, lse if case.q.dtype == torch.float32 else None)
    without = backend.attend(case.q, kv.layers[0], meta, **options)
    torch.testing.assert_close(without, out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 1, 7, 16, 1000])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
@pytest.mark.parametrize("sinks", [False, True])
def test_features_equal_dense_attention(dtype, window: int, softcap: float, sinks: bool):
    run(make_case(ROWS, dtype=dtype, window=window, softcap=softcap, sinks=sinks, group=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_pages_are_multiplied_with_their_heads_scales(dtype):
    run(make_case(ROWS, dtype=dtype, kv_dtype=FP8, kv_heads=3))


def test_what_is_written_to_fp8_pages_is_value_over_scale():
    torch.manual_seed(0)
    kv = KVPool.allocate(
        layers=2, pages=4, kv_heads=2, page_size=16, head_dim=8, dtype=FP8,
        device=torch.device("cpu"),
    )  # fmt: skip
    assert kv.k_scale is not None and kv.v_scale is not None and kv.k_scale.shape == (2, 2)
    kv.k_scale[1] = torch.tensor([0.3, 1.0])
    kv.v_scale[1] = torch.tensor([2.0, 1e-3])
    new = torch.randn(2, 5, 2, 8)
    new[0, 0, 0, 0] = float("nan")
    slots = torch.tensor([3, 17, 60, 0, 31])
    meta = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, 5]), cache_seqlens=torch.tensor([5]),
        page_tables=(torch.tensor([[0]], dtype=torch.int32),),
        slot_mappings=(slots,), max_seqlen_q=5, decode_rows=0, q_lens=(5,), kv_lens=(5,),
    )  # fmt: skip
    backend = ReferenceBackend()
    backend.write(new[0], new[1], kv.layers[1], backend.plan(meta, kv))
    scales = kv.layers[1].k_scale, kv.layers[1].v_scale
    for pool, scale, values in zip((kv.k, kv.v), scales, new, strict=True):
        assert scale is not None
        expected = (values / scale[:, None]).clamp(-448, 448).to(FP8).float()
        found = pool[1].float()[slots // 16, :, slots % 16]
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert (pool[0].float() == 0).all()
    assert kv.k[1].float().isnan().sum() == 1


def test_scales_take_their_bytes_of_the_pool():
    sizes = dict(layers=2, pages=4, kv_heads=2, page_size=16, head_dim=8)
    fp8 = KVPool.allocate(**sizes, dtype=FP8, device=torch.device("cpu"))
    half = KVPool.allocate(**sizes, dtype=torch.float16, device=torch.device("cpu"))
    assert fp8.num_bytes == half.num_bytes // 2 + 2 * 2 * 2 * 4
    assert half.layers[0].k_scale is None and half.layers[0].v_scale is None
