"""Experts by PyTorch's operations, against transformers' blocks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.mlp import SwigluMLP
from model_zoo.layers.moe.block import MoE
from model_zoo.layers.moe.experts import ExpertNames, Experts
from model_zoo.layers.moe.router.router import Router
from model_zoo.layers.moe.router.routing import route
from model_zoo.moe_config import MoEConfig, RouterConfig

LINEARS = LinearFactory(torch.float32)


def randomize(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def test_experts_of_gpt_oss_have_interleaved_transposed_weights_biases_and_clamps():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=16,
        intermediate_size=16,  # a square shape, by which nothing would be noticed
        num_local_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=1,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    module = randomize(GptOssMLP(config).float())
    moe = MoEConfig(
        router=RouterConfig(num_experts=4, top_k=2, scoring="topk_softmax"),
        intermediate_size=16,
        activation="clamped_swiglu",
        bias=True,
    )
    names = ExpertNames("experts", transposed=True, interleaved=True)
    experts = Experts(moe, 16, names, LINEARS)
    stored = dict(module.named_parameters())
    for name, tensor in experts.stacked_tensors().items():
        assert tensor.shape == tuple(stored[name].shape)
        assert tensor.place is not None
        tensor.place.copy_(stored[name].view(tensor.place.shape))
    x = torch.randn(11, 16) * 3
    logits = x @ stored["router.weight"].T + stored["router.bias"]
    expected = module(x[None])[0][0]
    torch.testing.assert_close(
        experts(x, *route(logits, moe.router, None)), expected, rtol=1e-4, atol=1e-4
    )


def test_a_block_with_a_gated_shared_expert_is_that_of_qwen():
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen

    config = qwen.Qwen3_5MoeTextConfig(
        hidden_size=16,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=12,
        num_experts=8,
        num_experts_per_tok=3,
    )
    module = randomize(qwen.Qwen3_5MoeSparseMoeBlock(config).float())
    stored = dict(module.named_parameters())
    moe = MoEConfig(
        router=RouterConfig(num_experts=8, top_k=3, renormalize=True),
        intermediate_size=8,
        shared_size=12,
        shared_gate=True,
    )
    router = Router(moe.router, 16, LINEARS, shared_gate=True)
    router.weight.copy_(stored["gate.weight"])
    assert router.shared_gate_weight is not None
    router.shared_gate_weight.copy_(stored["shared_expert_gate.weight"])
    experts = Experts(moe, 16, ExpertNames("experts"), LINEARS)
    for name, tensor in experts.stacked_tensors().items():
        assert tensor.place is not None
        tensor.place.copy_(stored[name])
    shared = SwigluMLP(
        LINEARS.swiglu(16, 12, "gate", "up", bias=False),
        LINEARS.linear(12, {"down": 16}, bias=False),
    )
    parts = [stored[f"shared_expert.{name}_proj.weight"] for name in ("gate", "up", "down")]
    shared.gate_up.weight.copy_(torch.cat(parts[:2]))
    shared.down.weight.copy_(parts[2])
    x = torch.randn(9, 16)
    expected = module(x[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    y, residual = MoE(router, experts, shared).add(x, x)
    assert residual is x and isinstance(y, Tensor)
    torch.testing.assert_close(y, expected.reshape(9, 16), rtol=1e-4, atol=1e-4)


def test_a_token_costs_only_its_own_experts(monkeypatch):
    moe = MoEConfig(router=RouterConfig(num_experts=6, top_k=2), intermediate_size=8)
    experts = Experts(moe, 16, ExpertNames("experts"), LINEARS)
    randomize(experts)
    used: list[int] = []
    product = type(experts.gate_up).product
    monkeypatch.setattr(
        type(experts.gate_up),
        "product",
        lambda stack, expert, x: used.append(expert) or product(stack, expert, x),
    )
    ids = torch.tensor([[4, 1], [1, 0]], dtype=torch.int32)
    experts(torch.randn(2, 16), ids, torch.rand(2, 2))
    assert used == [0, 0, 1, 1, 4, 4]
