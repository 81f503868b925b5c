"""Routers: the oracle against transformers' modules, and the kernel against the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_zoo.layers.moe.router.choose_experts import covers
from model_zoo.layers.moe.router.route_tokens import route_tokens
from model_zoo.layers.moe.router.routing import route
from model_zoo.moe_config import RouterConfig
from tests.support.kernels.router_cases import GROUPED

CONFIGS = {
    "softmax": RouterConfig(num_experts=60, top_k=4),
    "softmax renormalized": RouterConfig(num_experts=128, top_k=8, renormalize=True),
    "softmax of the chosen": RouterConfig(num_experts=32, top_k=4, scoring="topk_softmax"),
    "sigmoid": RouterConfig(num_experts=40, top_k=1, scoring="sigmoid"),
    "sigmoid with bias and groups": GROUPED,
    "all experts": RouterConfig(num_experts=5, top_k=5, renormalize=True),
}


def case(config: RouterConfig, tokens: int, device: str) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, config.num_experts, generator=generator) * 2
    bias = torch.randn(config.num_experts, generator=generator) / 4
    return logits.to(device), bias.to(device) if config.correction_bias else None


def dense(ids: Tensor, weights: Tensor, experts: int) -> Tensor:
    """The weight of every expert [T, E]."""
    return torch.zeros(len(ids), experts).scatter_(1, ids.long().cpu(), weights.cpu())


@pytest.mark.parametrize("renormalize", [True, False])
def test_softmax_routing_is_that_of_transformers(renormalize: bool):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    config = RouterConfig(num_experts=20, top_k=3, renormalize=renormalize)
    module = Qwen3MoeTopKRouter(
        Qwen3MoeConfig(
            hidden_size=16, num_experts=20, num_experts_per_tok=3, norm_topk_prob=renormalize
        )
    )
    torch.nn.init.normal_(module.weight)
    x = torch.randn(9, 16)
    _, expected, chosen = module(x)
    ids, weights = route(x @ module.weight.T, config, None)
    torch.testing.assert_close(dense(ids, weights, 20), dense(chosen, expected, 20))


def test_routing_with_groups_and_a_correction_bias_is_that_of_deepseek():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = RouterConfig(
        num_experts=32,
        top_k=4,
        scoring="sigmoid",
        renormalize=True,
        scale=2.5,
        groups=8,
        kept_groups=4,
        correction_bias=True,
    )
    module = DeepseekV3TopkRouter(
        DeepseekV3Config(
            hidden_size=16,
            n_routed_experts=32,
            num_experts_per_tok=4,
            n_group=8,
            topk_group=4,
            routed_scaling_factor=2.5,
            norm_topk_prob=True,
        )
    )
    torch.nn.init.normal_(module.weight)
    bias = torch.randn(32) / 10
    module.e_score_correction_bias.copy_(bias)
    x = torch.randn(9, 16)
    _, expected, chosen = module(x)
    ids, weights = route(x @ module.weight.T, config, bias)
    torch.testing.assert_close(dense(ids, weights, 32), dense(chosen, expected, 32))


def test_of_equal_scores_the_first_experts_are_taken():
    config = RouterConfig(num_experts=7, top_k=3)
    ids, weights = route(torch.tensor([[0.0, 1, 1, 0, 1, 1, 0]]), config, None)
    assert ids.tolist() == [[1, 2, 4]] and weights.unique().numel() == 1


@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernel_chooses_as_the_oracle_does(device: str, name: str):
    config = CONFIGS[name]
    logits, bias = case(config, 5, device)
    logits[1] = logits[1].round()  # many equal ones
    assert covers(config)
    ids, weights = route_tokens(logits, config, bias)
    expected_ids, expected_weights = route(logits, config, bias)
    assert torch.equal(ids, expected_ids) and ids.dtype == torch.int32
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("own", [range(0, 3), range(3, 6), range(1, 2)])
def test_experts_that_are_here_have_numbers_from_0_and_all_others_the_next_one(
    device: str, own: range
):
    config = CONFIGS["softmax"]
    logits, bias = case(config, 5, device)
    all_ids, all_weights = route(logits, config, bias)
    expected = [
        [id - own.start if id in own else len(own) for id in row] for row in all_ids.tolist()
    ]
    for choose in (route, route_tokens):
        ids, weights = choose(logits, config, bias, own)
        assert ids.tolist() == expected and ids.dtype == torch.int32
        torch.testing.assert_close(weights, all_weights, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_padding_that_are_not_numbers_choose_different_experts(device: str, name: str):
    config = CONFIGS[name]
    logits, bias = case(config, 3, device)
    logits[0] = float("nan")
    logits[1, 3:] = float("nan")
    logits[2, ::2] = float("inf")
    for ids in (route_tokens(logits, config, bias)[0], route(logits, config, bias)[0]):
        assert int(ids.min()) >= 0 and int(ids.max()) < config.num_experts
        assert all(len(set(row)) == config.top_k for row in ids.tolist())


def test_logits_may_be_columns_of_a_wider_product(device: str):
    config = CONFIGS["softmax"]
    wide = torch.randn(4, 61, device=device).to(torch.bfloat16)
    ids, weights = route_tokens(wide[:, :60], config, None)
    expected_ids, expected_weights = route(wide[:, :60], config, None)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)


def test_groups_that_are_no_powers_of_two_are_left_to_the_oracle():
    config = RouterConfig(num_experts=48, top_k=2, scoring="sigmoid", groups=4, kept_groups=2)
    assert not covers(config)
