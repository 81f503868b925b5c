"""A gated delta net's kernels on a GPU: rows that decode, and prompts.

    python -m benchmarks.delta_net.bench_delta_net --shape qwen3.6-27b --check

For each number of rows that decode, and each length of a prompt, microseconds of all launches of
one layer, with:

  bytes   of the states, read and written once, and of the tokens' inputs and outputs
  share   of the bandwidth of a copy, which is measured first: bytes / microseconds / it
  fla     flash-linear-attention's chunk_gated_delta_rule of the same prompt, or its
          fused_recurrent_gated_delta_rule of the same rows of one token, where that package is
          installed: without convolution, gates and gated norm, which the other column has
  mul_    PyTorch's multiplication of the states of rows that decode, in place

--tokens k gives each row that decodes k tokens.  --kernels hopper: prompts by the kernels that a
start on Hopper tries.  --all prints each of the tiles that can be chosen for prompts.
Inputs are random, and each call has another layer's weights and states, so that none is in the L2
cache when it is read again.  --check compares outputs and states with float64 first: the error is
the root of the mean squared difference over that of the values.  If $OUT is set, delta_net.json is
written there: one object a line.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.attention.timing import GraphTimer, measure_bandwidth
from benchmarks.delta_net.layers import (
    DIM,
    KEY_HEADS,
    SHAPES,
    DeltaNetStep,
    error,
    exact,
    make_step,
)
from model_zoo.layers.delta_net.chunk_plan import plan_chunks
from model_zoo.layers.delta_net.gated_delta_net import gated_delta_net
from model_zoo.layers.delta_net.inputs import MAX_DECODE_TOKENS
from model_zoo.layers.delta_net.prompts import delta_net_prompts
from model_zoo.layers.delta_net.tiles import PromptTiles

BF16 = torch.bfloat16
COLD_BYTES = 256 << 20  # of all layers that take turns: some times the L2 cache
MAX_LAYERS = 24
STATES = {"fp32": torch.float32, "bf16": BF16}
TILES = [
    PromptTiles(),
    PromptTiles(scan_stages=3),
    PromptTiles(block_v=128, scan_warps=8),
    PromptTiles(local_registers=128),
    PromptTiles(input_warps=4),
    PromptTiles(channels=256, input_warps=1),
    PromptTiles(local_hopper=True),
    PromptTiles(scan_hopper=True),
    PromptTiles(local_hopper=True, scan_hopper=True),
]
KERNELS = {
    "triton": PromptTiles(),
    "hopper": PromptTiles(local_hopper=True, scan_hopper=True),
}
Call = Callable[[DeltaNetStep, Tensor], object]  # of a step, into out


def planned(step: DeltaNetStep) -> DeltaNetStep:
    """With the plan that a model's step makes once for all layers."""
    rows = step.rows
    chunks = plan_chunks(rows.cu_seqlens, rows.cache_seqlens, len(step.qkv))
    return replace(step, rows=replace(rows, chunks=chunks))


def layers_for(value_heads: int, lens: list[int], arguments: argparse.Namespace) -> list:
    """Enough layers that take turns."""
    make = (value_heads, lens, arguments.before, STATES[arguments.state], "cuda")
    first = planned(make_step(*make))
    each = first.state_bytes // 2 + first.token_bytes
    count = max(2, min(MAX_LAYERS, -(-COLD_BYTES // each)))
    return [first, *(planned(make_step(*make)) for _ in range(count - 1))]


def check(step: DeltaNetStep, tiles: PromptTiles | None = None) -> tuple[float, float]:
    """The errors of the output and of the states, which are changed."""
    out, states = exact(step)
    found = gated_delta_net(*step.arguments, tiles)
    return error(found, out), error(step.state.state, states)


def candidates(step: DeltaNetStep) -> dict[str, Call]:
    """By name, each way to launch the kernels of prompts."""
    return {
        str(tiles): lambda s, out, t=tiles: delta_net_prompts(*s.arguments, s.rows.chunks, out, t)
        for tiles in TILES
    }


def fla_call(steps: list[DeltaNetStep], value_heads: int) -> Callable[[int], object] | None:
    """The recurrence by flash-linear-attention, on tensors of their own: of a prompt, or of rows of
    one token, whose states it writes elsewhere."""
    rows, tokens = steps[0].rows.num_rows, steps[0].rows.max_tokens
    decodes = tokens == 1
    if find_spec("fla") is None or (rows > 1 and not decodes):
        return None
    from fla.ops.gated_delta_rule import (  # pyright: ignore
        chunk_gated_delta_rule,
        fused_recurrent_gated_delta_rule,
    )

    rule = fused_recurrent_gated_delta_rule if decodes else chunk_gated_delta_rule

    def noise(heads: int) -> Tensor:
        return torch.randn(rows, tokens, heads, DIM, device="cuda").to(BF16)

    sets = []
    for _ in steps[:4]:
        q, k = (noise(KEY_HEADS).repeat_interleave(value_heads // KEY_HEADS, 2) for _ in range(2))
        g, beta = (torch.rand(rows, tokens, value_heads, device="cuda") for _ in range(2))
        state = torch.randn(rows, value_heads, DIM, DIM, device="cuda").mul_(0.1)
        sets.append((q, k, noise(value_heads), -g * 0.1, beta.to(BF16), state))

    def call(index: int) -> object:
        q, k, v, g, beta, state = sets[index % len(sets)]
        return rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip

    return call


def measure(
    value_heads: int, lens: list[int], timer: GraphTimer, arguments: argparse.Namespace
) -> dict:
    steps, tiles = layers_for(value_heads, lens, arguments), KERNELS[arguments.kernels]
    found: dict = {"rows": len(lens), "tokens": lens[0]}
    if arguments.check:
        found["errors"] = check(steps[0], tiles)
    calls: list[Callable[[int], object]] = [lambda i: gated_delta_net(*steps[i].arguments, tiles)]
    decodes = steps[0].rows.max_tokens <= MAX_DECODE_TOKENS
    ways = candidates(steps[0]) if arguments.all and not decodes else {}
    out = torch.empty(steps[0].z.shape, dtype=BF16, device="cuda")
    calls += [lambda i, way=way: way(steps[i], out) for way in ways.values()]
    if decodes:
        calls.append(lambda i: steps[i].state.state.mul_(0.999))
    fla = fla_call(steps, value_heads)
    if fla is not None:
        calls.append(fla)
    samples = timer.replay([timer.capture(call, len(steps)) for call in calls])
    times = [sample.us for sample in samples]
    found["us"], found["bytes"] = times[0], steps[0].state_bytes + steps[0].token_bytes
    found["fla"] = None if fla is None else times.pop()
    found["mul"] = times.pop() if decodes else None
    found["all"] = dict(zip(ways, times[1:], strict=False))
    return found


def line(found: dict, bandwidth: float) -> str:
    share = 100 * found["bytes"] / found["us"] / 1e6 / bandwidth
    text = f"{found['rows']:>5} {found['tokens']:>7} {found['us']:>10.1f} "
    text += f"{found['bytes'] / 1e6:>9.1f} {share:>5.0f} %"
    if found["fla"] is not None:
        text += f"  fla {found['fla']:.1f} ({found['fla'] / found['us']:.2f} times as long)"
    if found["mul"] is not None:
        text += f"  mul_ {found['mul']:.1f}"
    if "errors" in found:
        text += "  errors of output {:.1e}, states {:.1e}".format(*found["errors"])
    for name, us in found["all"].items():
        text += f"\n{'':>13} {us:>10.1f}  {name}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shape", choices=SHAPES, nargs="+", default=["qwen3.6-27b"])
    parser.add_argument("--state", choices=STATES, default="fp32", help="type of the states")
    parser.add_argument("--decode", type=int, nargs="*", default=[1, 8, 64, 256], help="rows")
    parser.add_argument("--tokens", type=int, default=1, help="of each row that decodes, 1 to 8")
    parser.add_argument("--prompt", type=int, nargs="*", default=[2048, 8192], help="tokens")
    parser.add_argument("--prompts", type=int, default=1, help="prompts of a step")
    parser.add_argument("--before", type=int, default=1000, help="tokens that sequences have")
    parser.add_argument("--replays", type=int, default=10, help="of each graph")
    parser.add_argument("--kernels", choices=KERNELS, default="triton")
    parser.add_argument("--all", action="store_true", help="print each of the tiles")
    parser.add_argument("--check", action="store_true", help="compare with float64 first")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    timer, results = GraphTimer(arguments.replays), []
    bandwidth = measure_bandwidth(torch.randn(1 << 28, device="cuda").to(BF16), timer)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}: microseconds of a layer")
    print(f"read {bandwidth.read:.2f}, copy {bandwidth.copy:.2f} TB/s")
    cases = [[arguments.tokens] * rows for rows in arguments.decode]
    cases += [[tokens] * arguments.prompts for tokens in arguments.prompt]
    for shape in arguments.shape:
        print(f"\n{shape}: {KEY_HEADS} and {SHAPES[shape]} heads, states in {arguments.state}")
        print(f"{'rows':>5} {'tokens':>7} {'us':>10} {'MB':>9} {'share':>7}")
        for lens in cases:
            found = measure(SHAPES[shape], lens, timer, arguments)
            print(line(found, bandwidth.copy), flush=True)
            results.append({"shape": shape, "state": arguments.state, **found})
            torch.cuda.empty_cache()
    if "OUT" in os.environ:
        path = Path(os.environ["OUT"]) / "delta_net.json"
        path.write_text("".join(json.dumps(one) + "\n" for one in results))


if __name__ == "__main__":
    main()
