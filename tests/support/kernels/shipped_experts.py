"""Calls of the experts' kernels as they are shipped, on tensors of no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe.experts import ExpertNames, Experts
from model_zoo.layers.moe.hopper.tiles import HopperTiles, hopper_candidates
from model_zoo.layers.moe.router.fused_router import fused_router
from model_zoo.layers.moe.router.route_tokens import route_tokens
from model_zoo.layers.moe.router.router import Router
from model_zoo.layers.moe.run import run_experts
from model_zoo.layers.moe.tiles import INVARIANT, candidates
from model_zoo.moe_config import MoEConfig, RouterConfig
from tests.support.kernels.expert_cases import scheme_of
from tests.support.kernels.shipped_attention import BF16, FP32, INT32, META, tensor

QWEN3 = MoEConfig(
    router=RouterConfig(num_experts=128, top_k=8, renormalize=True), intermediate_size=768
)
GPT_OSS = MoEConfig(
    router=RouterConfig(num_experts=32, top_k=4, scoring="topk_softmax"),
    intermediate_size=2880,
    activation="clamped_swiglu",
    bias=True,
)
DEEPSEEK = RouterConfig(
    num_experts=256,
    top_k=8,
    scoring="sigmoid",
    renormalize=True,
    groups=8,
    kept_groups=4,
    correction_bias=True,
)
# Of those in quantized_cases.py; None: bf16.
FORMATS = (None, "fp8 block", "fp8 row", "int4 g32 zeros", "nvfp4", "mxfp4")
TOKENS = (1, 8, 32, 512, 8192)


def experts_of(weights: str | None, ranks: int = 1) -> Experts:
    """The experts of Qwen3-30B-A3B, or for MXFP4 those of gpt-oss-20b, or the last of `ranks`
    equal parts of them."""
    config, hidden = (GPT_OSS, 2880) if weights == "mxfp4" else (QWEN3, 2048)
    if ranks > 1:
        count = config.router.num_experts
        config = replace(config, own=(count - count // ranks, count))
    with META:
        return Experts(
            config, hidden, ExpertNames("experts"), LinearFactory(BF16, scheme_of(weights, BF16))
        )


def call_experts(weights: str | None, tokens: int, index: int) -> None:
    """index: of the candidates of the GPU that is compiled for; of the last, if there are fewer."""
    experts = experts_of(weights)
    found = candidates(tokens, experts)
    tiles = found[min(index, len(found) - 1)]
    ids = tensor(tokens, experts.top_k, dtype=INT32)
    x, scores = tensor(tokens, experts.hidden), tensor(tokens, experts.top_k, dtype=FP32)
    run_experts(experts, x, ids, scores, x, x[:, 0], tiles)


def hopper_tiles(weights: str | None, tokens: int) -> list[HopperTiles]:
    """What an H100 tries."""
    experts = experts_of(weights)
    return hopper_candidates(
        132, tokens, experts.top_k, experts.all_experts, experts.gate_up, experts.down
    )


def call_hopper(weights: str | None, tokens: int, tiles: HopperTiles) -> None:
    experts = experts_of(weights)
    ids = tensor(tokens, experts.top_k, dtype=INT32)
    x, scores = tensor(tokens, experts.hidden), tensor(tokens, experts.top_k, dtype=FP32)
    run_experts(experts, x, ids, scores, x, x[:, 0], tiles)


def call_invariant(rows: int) -> None:
    experts = experts_of(None)
    experts.use_tiles({}, batch_invariant=True)
    tiles = candidates(rows * 16, experts)[0]
    ids = tensor(rows, experts.top_k, dtype=INT32)
    x, scores = tensor(rows, experts.hidden), tensor(rows, experts.top_k, dtype=FP32)
    run_experts(experts, x, ids, scores, None, None, tiles)


def call_some_experts(
    weights: str | None, tokens: int, tiles: HopperTiles | None = None, ranks: int = 2
) -> None:
    """Those of one of the ranks; by the first candidate, unless `tiles` are given."""
    experts = experts_of(weights, ranks)
    ids = tensor(tokens, experts.top_k, dtype=INT32)
    x, scores = tensor(tokens, experts.hidden), tensor(tokens, experts.top_k, dtype=FP32)
    run_experts(experts, x, ids, scores, x, x[:, 0], tiles or candidates(tokens, experts)[0])


def call_router(config: RouterConfig, own: range | None = None) -> None:
    bias = tensor(config.num_experts, dtype=FP32) if config.correction_bias else None
    route_tokens(tensor(64, config.num_experts), config, bias, own)


def call_fused_router(
    config: RouterConfig, hidden: int, own: range | None = None, *, gate: bool = False
) -> None:
    with META:
        router = Router(config, hidden, LinearFactory(BF16), shared_gate=gate, own=own)
    fused_router(tensor(1, hidden), router.linear, config, router.correction_bias, own)


EXPERTS: dict[str, Callable[[], None]] = {
    "router qwen3": partial(call_router, QWEN3.router),
    "router gpt-oss": partial(call_router, GPT_OSS.router),
    "router deepseek": partial(call_router, DEEPSEEK),
    "router of a rank": partial(call_router, QWEN3.router, range(64, 128)),
    "router of the first rank": partial(call_router, QWEN3.router, range(64)),
    "fused router qwen3": partial(call_fused_router, QWEN3.router, 2048),
    "fused router qwen3.5": partial(
        call_fused_router, replace(QWEN3.router, num_experts=256), 2048, gate=True
    ),
    "fused router gpt-oss": partial(call_fused_router, replace(GPT_OSS.router, bias=True), 2880),
    "fused router deepseek": partial(call_fused_router, DEEPSEEK, 7168),
    "fused router of a rank": partial(call_fused_router, QWEN3.router, 2048, range(64, 128)),
    "fused router of the first rank": partial(call_fused_router, QWEN3.router, 2048, range(64)),
}
for tokens in (8, 32):
    EXPERTS[f"some experts at {tokens}"] = partial(call_some_experts, "fp8 block", tokens)
    EXPERTS[f"some experts, one, at {tokens}"] = partial(
        call_some_experts, "fp8 block", tokens, ranks=QWEN3.router.num_experts
    )
for rows in INVARIANT:
    EXPERTS[f"experts invariant {rows}"] = partial(call_invariant, rows)
for weights in FORMATS:
    for tokens in TOKENS:
        for index in range(len(candidates(tokens, experts_of(weights)))):
            name = f"experts {weights or 'bf16'} at {tokens}, {index}"
            EXPERTS[name] = partial(call_experts, weights, tokens, index)
HOPPER_EXPERTS: dict[str, tuple[HopperTiles, Callable[[], None]]] = {}
for weights in (None, "fp8 block", "mxfp4"):
    for tokens in (1, 8, 128, 512, 2048):
        for index, tiles in enumerate(hopper_tiles(weights, tokens)):
            name = f"hopper experts {weights or 'bf16'} at {tokens}, {index}"
            HOPPER_EXPERTS[name] = tiles, partial(call_hopper, weights, tokens, tiles)
