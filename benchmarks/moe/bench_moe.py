"""The experts of a layer on a GPU, by number of tokens, format and routing.

    python -m benchmarks.moe.bench_moe --shape qwen3-30b-a3b --format bf16 --all

For each number of tokens, microseconds of both products with the weighted sum, without the router:

  balanced   the experts have as many tokens each as can be
  zipf       expert i is chosen as if by a probability of 1 / i: few experts have many tokens
  floor      of balanced routing: the bytes of the chosen experts at --bandwidth, or the operations
             at --tflops, whichever takes longer
  share      floor / balanced

with the fastest of the tiles that are tried, which are timed on random routing as at a server's
start; --all prints the times of each on balanced routing.  The last line is the router alone: its
product and the choice.  Weights are random and in layers of their own, each call has another
routing, so that none is in the L2 cache when it is read again.  --check compares outputs of each
tile with float32 sums first.  If $OUT is set, moe.json is written there: one object a line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.attention.timing import GraphTimer, time_one
from model_zoo.layers.linear_factory import LinearFactory
from model_zoo.layers.moe.activation import activate
from model_zoo.layers.moe.autotune import choose
from model_zoo.layers.moe.autotune import layers_by_key as keys_of
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.layers.moe.experts import ExpertNames, Experts
from model_zoo.layers.moe.router.router import Router
from model_zoo.layers.moe.run import run_experts
from model_zoo.layers.moe.tiles import Tiles, candidates
from model_zoo.layers.moe.timing import times
from model_zoo.layers.quantized_gemm.dequantize import dequantize_into
from model_zoo.loader import fill_randomly
from model_zoo.moe_config import MoEConfig, RouterConfig
from model_zoo.quantization.weight_scheme import WeightScheme
from runtime.precompile.compiling import compiling_only
from runtime.precompile.pool import Compilers

BF16 = torch.bfloat16
TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192]
CALLS = 6  # routings of each kind


def _swiglu(experts: int, top_k: int, inner: int) -> MoEConfig:
    router = RouterConfig(num_experts=experts, top_k=top_k, renormalize=True)
    return MoEConfig(router=router, intermediate_size=inner)


def _gpt_oss(experts: int) -> MoEConfig:
    router = RouterConfig(num_experts=experts, top_k=4, scoring="topk_softmax")
    return MoEConfig(router=router, intermediate_size=2880, activation="clamped_swiglu", bias=True)


SHAPES: dict[str, tuple[int, MoEConfig]] = {  # hidden size, experts
    "qwen3-30b-a3b": (2048, _swiglu(128, 8, 768)),
    "qwen3.5-35b-a3b": (2048, _swiglu(256, 8, 512)),
    "gpt-oss-20b": (2880, _gpt_oss(32)),
    "gpt-oss-120b": (2880, _gpt_oss(128)),
}


def scheme(kind: str, inputs: int) -> WeightScheme | None:
    """The scheme of a format of FORMATS, for K = inputs."""
    match kind:
        case "bf16":
            return None
        case "fp8-block":
            return WeightScheme(
                kind="fp8", row_group=128, column_group=128, scale_dtype=torch.float32
            )
        case "fp8-channel":
            return WeightScheme(
                kind="fp8", row_group=1, column_group=inputs, scale_dtype=torch.float32
            )
        case "int4":
            return WeightScheme(kind="int4", row_group=1, column_group=128, scale_dtype=BF16)
        case "mxfp4":
            return WeightScheme(kind="fp4", row_group=1, column_group=32, scale_dtype=torch.uint8)
        case "nvfp4":
            return WeightScheme(
                kind="fp4", row_group=1, column_group=16, scale_dtype=torch.uint8, row_scales=True
            )
    raise ValueError(kind)


FORMATS = ("bf16", "fp8-block", "fp8-channel", "int4", "mxfp4", "nvfp4")


@dataclass(frozen=True, slots=True)
class Case:
    """Layers of experts, and what is timed with them."""

    layers: list[Experts]
    bandwidth: float  # bytes a microsecond
    tflops: float

    def floor(self, ids: Tensor) -> float:
        """The fewest microseconds for tokens with these experts."""
        experts = self.layers[0]
        chosen = ids.unique().numel() / experts.num_experts
        operations = 6 * ids.numel() * experts.hidden * experts.inner
        return max(chosen * experts.nbytes / self.bandwidth, operations / self.tflops / 1e6)


def make_layers(shape: str, kind: str, count: int, device: str) -> list[Experts]:
    hidden, config = SHAPES[shape]
    linears = LinearFactory(BF16, lambda parts, inputs: scheme(kind, inputs))
    with torch.device(device):
        layers = [Experts(config, hidden, ExpertNames("experts"), linears) for _ in range(count)]
    fill_randomly(nn.ModuleList(layers))
    return layers


def balanced(experts: Experts, tokens: int, device: str) -> Tensor:
    """[T, k] int32: consecutive experts of a random order, as often as it takes."""
    order = torch.randperm(experts.num_experts, device=device)
    pairs = torch.arange(tokens * experts.top_k, device=device) % experts.num_experts
    return order[pairs].view(tokens, experts.top_k).int()


def zipf(experts: Experts, tokens: int, device: str) -> Tensor:
    """[T, k] int32: by Gumbel's trick, which draws k different ones by their probabilities."""
    ranks = torch.randperm(experts.num_experts, device=device) + 1.0
    uniform = torch.rand(tokens, experts.num_experts, device=device).clamp_min(1e-20)
    return (-ranks.log() - (-uniform.log()).log()).topk(experts.top_k).indices.int()


def call_of(
    case: Case, x: Tensor, routings: list[Tensor], weights: Tensor, tiles: Tiles
) -> Callable[[int], Tensor]:
    layers = case.layers
    return lambda i: run_experts(layers[i % len(layers)], x, routings[i], weights, tiles=tiles)


def check(case: Case, tokens: int, x: Tensor, ids: Tensor, weights: Tensor) -> float:
    """The largest error of any candidate, in units of the output's standard deviation."""
    experts = case.layers[0]
    few = min(tokens, 16)
    expected = torch.zeros(few, experts.hidden, device=x.device)
    for expert in ids[:few].unique().tolist():
        chose = ids[:few] == expert
        rows = chose.any(1)
        inner = product(experts.gate_up, expert, x[:few][rows].float())
        y = product(experts.down, expert, activate(inner, experts.activation))
        expected[rows] += y * (weights[:few] * chose).sum(1)[rows, None]
    worst = 0.0
    for tiles in candidates(tokens, experts):
        found = run_experts(experts, x, ids, weights, tiles=tiles)[:few].float()
        worst = max(worst, float((found - expected).abs().max() / expected.std()))
    return worst


def product(stack: ExpertStack, expert: int, x: Tensor) -> Tensor:
    """x [T, K] float32 times one expert's weight, plus its bias."""
    if stack.packed is None:
        weight = stack.weight[expert]
    else:
        one = stack.packed.of(expert)
        weight = torch.empty(one.shape, dtype=BF16, device=x.device)
        dequantize_into(one, weight)
    y = x @ weight[:, : stack.inputs].float().T
    return y if stack.bias is None else y + stack.bias[expert].float()


def compile_candidates(case: Case, tokens: list[int]) -> None:
    """On all cores, before they are timed one after the other."""
    experts = case.layers[0]
    with compiling_only(Compilers()):
        for count in tokens:
            x = torch.zeros(count, experts.hidden, dtype=BF16, device="cuda")
            ids = balanced(experts, count, "cuda")
            weights = torch.ones(ids.shape, device="cuda")
            for tiles in candidates(count, experts):
                run_experts(experts, x, ids, weights, tiles=tiles)


def measure(case: Case, tokens: int, timer: GraphTimer, arguments: argparse.Namespace) -> dict:
    experts, device = case.layers[0], "cuda"
    x = torch.randn(tokens, experts.hidden, device=device).to(BF16)
    weights = torch.full((tokens, experts.top_k), 1 / experts.top_k, device=device)
    even = [balanced(experts, tokens, device) for _ in range(CALLS)]
    uneven = [zipf(experts, tokens, device) for _ in range(CALLS)]
    error = check(case, tokens, x, uneven[0], weights) if arguments.check else None
    tried = candidates(tokens, experts)
    keys = [key for key in keys_of(nn.ModuleList(case.layers)) if key.tokens == tokens]
    tiles = choose({keys[0]: case.layers}, times, 60.0)[keys[0]][0] if keys else tried[0]
    graphs = [
        timer.capture(call_of(case, x, routings, weights, tiles), CALLS)
        for routings in (even, uneven)
    ]
    by_balance = [sample.us for sample in timer.replay(graphs)]
    found: dict[str, object] = {
        "tokens": tokens,
        "balanced": by_balance[0],
        "zipf": by_balance[1],
        "floor": case.floor(even[0]),
        "tiles": str(tiles),
        "error": error,
    }
    if arguments.all:
        graphs = [timer.capture(call_of(case, x, even, weights, one), CALLS) for one in tried]
        all_of = timer.replay(graphs)
        found["all"] = {str(one): s.us for one, s in zip(tried, all_of, strict=True)}
    return found


def line(found: dict) -> str:
    share = 100 * found["floor"] / found["balanced"]
    text = f"{found['tokens']:>6} {found['balanced']:>9.1f} {found['zipf']:>9.1f} "
    text += f"{found['floor']:>9.1f} {share:>5.0f} %  {found['tiles']}"
    if found["error"] is not None:
        text += f"  error {found['error']:.3f}"
    for tiles, us in found.get("all", {}).items():
        text += f"\n{'':>7}{us:>9.1f}  {tiles}"
    return text


def router_us(shape: str, tokens: list[int], timer: GraphTimer) -> dict[int, float]:
    hidden, config = SHAPES[shape]
    with torch.device("cuda"):
        router = Router(config.router, hidden, LinearFactory(BF16))
    fill_randomly(router)
    found: dict[int, float] = {}
    for count in tokens:
        x = torch.randn(count, hidden, device="cuda").to(BF16)
        found[count] = time_one(timer, lambda _, x=x: router(x))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen3-30b-a3b"])
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["bf16"])
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--replays", type=int, default=10, help="of each graph")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that a floor counts on")
    parser.add_argument("--tflops", type=float, default=800.0, help="that a floor counts on")
    parser.add_argument("--all", action="store_true", help="print each of the tiles that are tried")
    parser.add_argument("--check", action="store_true", help="compare outputs first")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.cuda.get_device_name()
    print(f"{device}, PyTorch {torch.__version__}: microseconds")
    busy = torch.randn(8192, 8192, device="cuda").to(BF16)
    time_one(GraphTimer(50), lambda _: busy @ busy)  # until clocks are those of work
    timer, results = GraphTimer(arguments.replays), []
    for shape in arguments.shape:
        for kind in arguments.format:
            layers = make_layers(shape, kind, arguments.layers, "cuda")
            case = Case(layers, arguments.bandwidth * 1e6, arguments.tflops)
            compile_candidates(case, arguments.tokens)
            print(f"\n{shape}, {kind}: {layers[0].nbytes / 1e9:.2f} GB of experts a layer")
            print(f"{'tokens':>6} {'balanced':>9} {'zipf':>9} {'floor':>9} {'share':>7}  tiles")
            for tokens in arguments.tokens:
                found = measure(case, tokens, timer, arguments)
                print(line(found), flush=True)
                results.append({"shape": shape, "format": kind, **found})
            del layers, case
            torch.cuda.empty_cache()
        found = router_us(shape, arguments.tokens, timer)
        print("router: " + ", ".join(f"{count}: {us:.1f}" for count, us in found.items()))
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / "moe.json"
        path.write_text(json.dumps({"device": device, "results": results}, indent=1))


if __name__ == "__main__":
    main()
