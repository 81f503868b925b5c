"""The fused router of few tokens: the bits of a product and route(), where sums are exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from torch import Tensor

from model_zoo.layers import fused_kernels
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe.router import fused_router as module
from model_zoo.layers.moe.router.fused_router import blocks, fused_router, fuses, workspace
from model_zoo.layers.moe.router.router import Router
from model_zoo.layers.moe.router.routing import route
from model_zoo.moe_config import MAX_EXPERTS, RouterConfig, Scoring
from tests.support.examples import examples
from tests.support.kernels.router_cases import GROUPED

SOFTMAX = RouterConfig(num_experts=60, top_k=4)
CONFIGS = {
    "softmax": SOFTMAX,
    "softmax renormalized, bias": replace(SOFTMAX, num_experts=33, renormalize=True, bias=True),
    "softmax of the chosen": replace(SOFTMAX, num_experts=32, scoring="topk_softmax", bias=True),
    "sigmoid": replace(SOFTMAX, num_experts=40, top_k=1, scoring="sigmoid"),
    "sigmoid with bias and groups": GROUPED,
    "all experts": RouterConfig(num_experts=5, top_k=5, renormalize=True),
}
DTYPES = torch.float32, torch.bfloat16, torch.float16


def router_of(
    config: RouterConfig,
    hidden: int,
    dtype: torch.dtype,
    device: str,
    *,
    gate: bool = False,
    own: range | None = None,
) -> Router:
    """With weights and biases that are small multiples of 1/16: many logits are equal."""
    generator = torch.Generator().manual_seed(hidden)
    router = Router(config, hidden, LinearFactory(dtype), shared_gate=gate, own=own)
    for parameter in router.parameters():
        parameter.copy_(torch.randint(-4, 5, parameter.shape, generator=generator) / 16)
    return router.to(device)


def rows(tokens: int, hidden: int, dtype: torch.dtype, device: str) -> Tensor:
    """Of small integers, some 50 in a row: with weights of router_of no output is rounded.

    The interpreter truncates to bfloat16.
    """
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randint(-3, 4, (tokens, hidden), generator=generator)
    x[:, torch.randperm(hidden, generator=generator)[50:]] = 0
    x[:, -1] = 1
    return x.to(device, dtype)


def expected(router: Router, x: Tensor, own: range | None) -> tuple[Tensor, Tensor, Tensor]:
    """ids, weights, and outputs after the experts'."""
    linear = router.linear
    outputs = x.double() @ linear.weight.double().T
    if linear.bias is not None:
        outputs += linear.bias.double()
    outputs = outputs.to(linear.dtype)
    count = router.config.num_experts
    ids, weights = route(outputs[:, :count], router.config, router.correction_bias, own)
    return ids, weights, outputs[:, count:]


def check(router: Router, x: Tensor, own: range | None = None) -> None:
    ids, weights, gate = fused_router(x, router.linear, router.config, router.correction_bias, own)
    expected_ids, expected_weights, gates = expected(router, x, own)
    assert torch.equal(ids, expected_ids) and ids.dtype == torch.int32
    torch.testing.assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    if gate is None:
        assert gates.shape[1] == 0
    else:
        assert gate.dtype == router.linear.dtype and torch.equal(gate, gates[:, 0])
    assert not workspace(x.device)[1].any()  # the next launch finds no counts


@pytest.mark.parametrize("gate", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_weights_and_gate_are_those_of_a_product_and_the_oracle(
    device: str, name: str, dtype: torch.dtype, gate: bool
):
    router = router_of(CONFIGS[name], 64, dtype, device, gate=gate)
    for tokens in (1, 3, 8):
        check(router, rows(tokens, 64, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden", [8, 2048, 2880, 7168])  # the largest ones by several blocks
def test_any_hidden_size_is_summed_over_all_its_columns(
    device: str, hidden: int, dtype: torch.dtype
):
    config = replace(SOFTMAX, num_experts=5, top_k=2)
    router = router_of(config, hidden, dtype, device, gate=True)
    check(router, rows(2, hidden, dtype, device))


@examples(40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(1, 8),
    hidden=st.integers(1, 9).map(lambda eighths: 8 * eighths),
    experts=st.integers(1, 70),
    top_k=st.integers(1, 10),
    scoring=st.sampled_from(["softmax", "topk_softmax", "sigmoid"]),
    flags=st.tuples(*[st.booleans()] * 4),
    dtype=st.sampled_from(DTYPES),
    own=st.tuples(st.integers(0, 70), st.integers(1, 70)),
)
def test_any_router_chooses_as_a_product_and_the_oracle_do(
    device: str,
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    scoring: Scoring,
    flags: tuple[bool, bool, bool, bool],
    dtype: torch.dtype,
    own: tuple[int, int],
):
    gate, bias, renormalize, correction = flags
    config = RouterConfig(
        num_experts=experts,
        top_k=min(top_k, experts),
        scoring=scoring,
        renormalize=renormalize,
        bias=bias,
        correction_bias=correction and scoring == "sigmoid",
    )
    first = min(own[0], experts - 1)
    own_experts = range(first, min(first + own[1], experts))
    router = router_of(config, hidden, dtype, device, gate=gate)
    check(router, rows(tokens, hidden, dtype, device), own_experts)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_of_padding_that_are_not_numbers_choose_different_experts(device: str):
    for config in CONFIGS.values():
        router = router_of(config, 64, torch.bfloat16, device)
        x = rows(3, 64, torch.bfloat16, device)
        x[0], x[1, 5] = float("nan"), float("inf")
        ids, _, _ = fused_router(x, router.linear, config, router.correction_bias)
        assert int(ids.min()) >= 0 and int(ids.max()) < config.num_experts
        assert all(len(set(row)) == config.top_k for row in ids.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_among_others_as_alone(device: str, dtype: torch.dtype):
    router = router_of(CONFIGS["softmax"], 64, dtype, device, gate=True)
    x = torch.randn(8, 64, device=device).to(dtype)
    many = fused_router(x, router.linear, router.config, None)
    for token in range(8):
        alone = fused_router(x[token : token + 1], router.linear, router.config, None)
        for one, all_of in zip(alone, many, strict=True):
            assert one is not None and all_of is not None
            assert torch.equal(one[0], all_of[token])


def test_rows_may_be_columns_of_a_wider_tensor(device: str):
    router = router_of(CONFIGS["softmax"], 64, torch.bfloat16, device)
    check(router, rows(4, 72, torch.bfloat16, device)[:, :64])


def test_numbers_that_are_rounded_are_near_those_of_the_oracle(device: str):
    router = router_of(CONFIGS["sigmoid with bias and groups"], 256, torch.bfloat16, device)
    for parameter in router.parameters():
        parameter.copy_(torch.randn_like(parameter) / 8)
    x = torch.randn(8, 256, device=device).to(torch.bfloat16)
    ids, weights, _ = fused_router(x, router.linear, router.config, router.correction_bias)
    expected_ids, expected_weights, _ = expected(router, x, None)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)


def test_more_tokens_and_bytes_and_batch_invariant_products_are_left_to_two_launches():
    def linear(hidden: int, config: RouterConfig, dtype: torch.dtype = torch.bfloat16):
        with torch.device("meta"):
            return Router(config, hidden, LinearFactory(dtype)).linear

    def most_tokens(hidden: int, config: RouterConfig) -> int:
        one = linear(hidden, config)
        return max((n for n in range(20) if fuses(n, config, one)), default=0)

    sigmoid = RouterConfig(num_experts=256, top_k=8, scoring="sigmoid")  # in float32
    assert most_tokens(2048, replace(SOFTMAX, num_experts=128)) == 8
    assert most_tokens(2048, replace(SOFTMAX, num_experts=256)) == 5
    assert most_tokens(2048, replace(SOFTMAX, num_experts=512)) == 3
    assert most_tokens(2880, replace(SOFTMAX, num_experts=32)) == 8
    assert most_tokens(7168, sigmoid) == 1
    assert most_tokens(16384, SOFTMAX) == 0 and most_tokens(1001, SOFTMAX) == 0
    assert most_tokens(64, replace(sigmoid, num_experts=48, groups=4, kept_groups=2)) == 0
    invariant = linear(64, SOFTMAX)
    assert fuses(1, SOFTMAX, invariant)
    invariant.use_gemms({}, batch_invariant=True)
    assert not fuses(1, SOFTMAX, invariant)


def test_a_program_has_at_most_the_registers_of_one_block():
    for hidden in (8, 64, 2048, 2880, 4096, 5120, 7168, 8192):
        for itemsize in (2, 4):
            outputs, columns = blocks(hidden, itemsize)
            assert outputs * columns * itemsize <= module.BLOCK_BYTES and outputs in (1, 2)
    assert workspace(torch.device("cpu"))[0].numel() == module.MAX_TOKENS * MAX_EXPERTS


def test_a_router_fuses_few_tokens_only(device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_kernels, "use_fused_kernels", lambda device: True)
    fused: list[int] = []
    monkeypatch.setattr(
        module, "fused_router", lambda x, *rest: fused.append(len(x)) or fused_router(x, *rest)
    )
    own = range(20, 40)
    router = router_of(CONFIGS["softmax"], 64, torch.float32, device, gate=True, own=own)
    for tokens in (1, 8, 9):
        x = rows(tokens, 64, torch.float32, device)
        routed = router(x)
        ids, weights, gates = expected(router, x, own)
        assert torch.equal(routed.ids, ids)
        torch.testing.assert_close(routed.weights, weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(routed.shared_gate, gates[:, 0])
    assert fused == [1, 8]
