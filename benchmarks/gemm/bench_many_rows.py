"""GEMMs of many rows on a Hopper GPU: in short runs, and at its power limit.

    python -m benchmarks.gemm.bench_many_rows --model qwen3-8b --rows 512 1024 2048

For each number of rows and each GEMM of a layer: microseconds (TFLOP/s) of cuBLAS, and of
silu(gate) * up unfused and fused.  Then the time of a layer's GEMMs per token, with the faster of
these two: step sizes with the lowest time per token are best.

short    single replays of graphs of a few GEMMs over different weights, with a pause before each
lasting  the subjects of a size interleaved, each for --slice seconds of which the first third does
         not count; before the first one the device is kept busy until it is at its power limit
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention.timing import elapsed_us
from benchmarks.gemm.gemm_chain import MODELS, ModelSizes
from model_zoo.layers.gemm.swiglu import SwigluGemm, UnfusedSwiglu
from model_zoo.layers.gemm.timing import COLD_BYTES

REPLAYS, PAUSE_SECONDS = 3, 0.003
WARM_SECONDS, ROUNDS = 1.5, 3
BLOCK, SWIGLU = "gate_up", ("unfused", "swiglu")

GemmCall = Callable[[int], Tensor]
Times = Mapping[str, float]  # microseconds, by what is computed


@dataclass(frozen=True, slots=True)
class Recorded:
    """A graph of GEMMs, and the operations of one of them."""

    graph: torch.cuda.CUDAGraph
    calls: int
    operations: int

    def run(self, replays: int) -> float:
        """Microseconds per GEMM."""
        us = elapsed_us(lambda: [self.graph.replay() for _ in range(replays)])
        return us / self.calls / replays


def calls_of(
    weights: Mapping[str, list[Tensor]], rows: int
) -> dict[str, tuple[GemmCall, int, int]]:
    """What is timed with each of a layer's weights, how many there are, and the operations."""
    found: dict[str, tuple[GemmCall, int, int]] = {}
    for name, layers in weights.items():
        outputs, inputs = layers[0].shape
        x = torch.randn(rows, inputs, dtype=layers[0].dtype, device=layers[0].device)
        work = 2 * rows * outputs * inputs
        found[name] = (lambda i, x=x, w=layers: F.linear(x, w[i])), len(layers), work
        if name == BLOCK:
            for title, subject in zip(SWIGLU, (UnfusedSwiglu(), SwigluGemm()), strict=True):
                call = lambda i, x=x, w=layers, subject=subject: subject.run(x, w[i], None)  # noqa: E731
                found[title] = call, len(layers), work
    return found


def cold(outputs: int, inputs: int) -> list[Tensor]:
    """Enough weights that each is evicted from the L2 cache before it is read again."""
    several = max(3, -(-COLD_BYTES // (2 * outputs * inputs)))
    return [
        torch.randn(outputs, inputs, device="cuda").mul_(inputs**-0.5).bfloat16()
        for _ in range(several)
    ]


def recorded(call: GemmCall, calls: int, operations: int) -> Recorded:
    call(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return Recorded(graph, calls, operations)


def short(subjects: Mapping[str, Recorded]) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for replay in range(REPLAYS + 1):
        for name, subject in subjects.items():
            time.sleep(PAUSE_SECONDS)
            us = subject.run(1)
            found[name] += [us] if replay else []
    return {name: statistics.median(several) for name, several in found.items()}


def lasting(subjects: Mapping[str, Recorded], alone: Times, seconds: float) -> dict[str, float]:
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(ROUNDS):
        for name, subject in subjects.items():
            replays = max(1, round(seconds / 3 * 1e6 / (subject.calls * alone[name])))
            subject.run(replays)
            found[name].append(subject.run(2 * replays))
    return {name: statistics.median(several) for name, several in found.items()}


def of_layer(times: Times, sizes: ModelSizes) -> float:
    """Microseconds of a layer's GEMMs, with the faster SwiGLU."""
    gemms = [name for name in sizes.shapes() if name not in (BLOCK, "lm_head")]
    return sum(times[name] for name in gemms) + min(times[subject] for subject in SWIGLU)


def line(title: str, times: Times, operations: Mapping[str, int], rows: int, layer: float) -> str:
    columns = (f"{us:8.1f} ({operations[name] / us / 1e6:3.0f})" for name, us in times.items())
    return f"{rows:>6} {title:8}" + " ".join(columns) + f" {layer:9.1f} {layer / rows:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b", help="whose shapes")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--slice", type=float, default=0.24, help="seconds of a subject at a time")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = MODELS[arguments.model]
    weights = {name: cold(*sizes.shapes()[name]) for name in sizes.shapes() if name != "lm_head"}
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    print(f"{'rows':>6} {'':8}" + " ".join(f"{name:>14}" for name in calls_of(weights, 1)), end="")
    print("   a layer, a token")
    warm = False
    for rows in arguments.rows:
        subjects = {name: recorded(*call) for name, call in calls_of(weights, rows).items()}
        operations = {name: subject.operations for name, subject in subjects.items()}
        alone = short(subjects)
        print(line("short", alone, operations, rows, of_layer(alone, sizes)))
        if not warm:
            lasting(subjects, alone, WARM_SECONDS / ROUNDS / len(subjects))
        warm = True
        going_on = lasting(subjects, alone, arguments.slice)
        print(line("lasting", going_on, operations, rows, of_layer(going_on, sizes)), flush=True)


if __name__ == "__main__":
    main()
