"""Each layer attends as its own AttentionSpec says: window, scale, softcap and sinks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attention.kv_pool import KVPool
from attention.metadata import AttentionMetadata
from attention.reference import ReferenceBackend
from model_zoo.config import ModelConfig
from model_zoo.inputs import ModelInput
from model_zoo.layers.attention import Attention
from model_zoo.layers.linear_factory import LinearFactory

HEADS, KV_HEADS, DIM, TOKENS = 4, 2, 16, 21
HIDDEN = HEADS * DIM
CONFIG = ModelConfig(
    model_type="llama", vocab_size=8, hidden_size=HIDDEN, intermediate_size=8, num_layers=2,
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM, max_position=64, norm_eps=1e-6,
    rope=None, tie_embeddings=True, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False,
    eos_ids=(), dtype="float32", windows=(0, 5), attention_scale=0.3, attention_softcap=2.0,
    attention_sinks=True,
)  # fmt: skip


def dense(qkv: Tensor, sinks: Tensor, window: int) -> Tensor:
    """The attention of a layer without rope, in float64."""
    q, k, v = qkv.double().view(TOKENS, -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
    k, v = (pool.repeat_interleave(HEADS // KV_HEADS, 1) for pool in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * 0.3
    logits = 2.0 * torch.tanh(logits / 2.0)
    distance = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    outside = (distance < 0) | ((distance >= window) if window else torch.tensor(False))
    logits = logits.masked_fill(outside, float("-inf"))
    with_sink = torch.cat([logits, sinks.double()[:, None, None].expand(-1, TOKENS, 1)], -1)
    weights = with_sink.softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


def test_each_layer_has_its_own_window_and_all_share_scale_softcap_and_sinks():
    torch.manual_seed(0)
    linears = LinearFactory(torch.float32)
    backend = ReferenceBackend()
    kv = KVPool.allocate(
        layers=2, pages=4, kv_heads=KV_HEADS, page_size=16, head_dim=DIM, dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    meta = AttentionMetadata(
        cu_seqlens_q=torch.tensor([0, TOKENS], dtype=torch.int32),
        cache_seqlens=torch.tensor([TOKENS], dtype=torch.int32),
        page_tables=(torch.tensor([[3, 1]], dtype=torch.int32),),
        slot_mappings=(torch.tensor([(3, 1)[i // 16] * 16 + i % 16 for i in range(TOKENS)]),),
        max_seqlen_q=TOKENS, decode_rows=0, q_lens=(TOKENS,), kv_lens=(TOKENS,),
    )  # fmt: skip
    positions = torch.arange(TOKENS)
    inp = ModelInput(positions, positions, None, backend.plan(meta, kv), kv, backend)
    x, residual = torch.randn(TOKENS, HIDDEN), torch.zeros(TOKENS, HIDDEN)
    for index in range(2):
        width = (HEADS + 2 * KV_HEADS) * DIM
        qkv = linears.linear(HIDDEN, {"qkv": width}, bias=False)
        out = linears.linear(HIDDEN, {"out": HIDDEN}, bias=False)
        layer = Attention(CONFIG, index, qkv, out)
        assert layer.sinks is not None and layer.spec.window == CONFIG.windows[index]
        layer.sinks = nn.Parameter(torch.randn(HEADS), requires_grad=False)
        qkv.weight.copy_(torch.randn(width, HIDDEN) / 8)
        out.weight.copy_(torch.eye(HIDDEN))
        added, base = layer.add(x, residual, inp, None)
        result = base if added is None else base + added
        wanted = dense(x @ qkv.weight.T, layer.sinks, CONFIG.windows[index]).float()
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-5)
    assert CONFIG.attention_specs[0] != CONFIG.attention_specs[1]
