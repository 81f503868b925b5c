"""GEMMs of few rows on a GPU: cuBLAS and our own, alone and inside a step.

    python -m benchmarks.gemm.bench_gemm --model qwen3-8b --rows 1 8 32 64

For each GEMM of the model: microseconds after a small kernel, over the weights of all layers, and
the share of the read bandwidth measured in the same run.  Then whole steps without attention
(gemm_chain.py) in one graph: with cuBLAS, and with the fastest GEMM of each shape.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention.timing import GraphTimer, measure_bandwidth, time_one
from benchmarks.gemm.gemm_chain import MODELS, Chain, GemmFunction, ModelSizes, random_weights
from model_zoo.layers.gemm.autotune import BETTER
from model_zoo.layers.gemm.candidates import candidates
from model_zoo.layers.gemm.implementations import GemmImpl
from model_zoo.layers.gemm.timing import GemmTimer

READ_BYTES = 2 << 30  # for the bandwidth


def times_of(weights: list[Tensor], rows: int) -> dict[GemmImpl, float]:
    """Microseconds of each candidate, cuBLAS first."""
    outputs, inputs = weights[0].shape
    gemms = candidates(weights[0].device, rows, outputs, inputs)
    timer = GemmTimer(weights, None, rows, weights[0].dtype)
    return dict(zip(gemms, timer.microseconds(gemms), strict=True))


def fastest(times: Mapping[GemmImpl, float]) -> GemmImpl:
    """The choice of autotune.py."""
    plain = next(iter(times))
    best = min(times, key=times.__getitem__)
    return best if times[best] < BETTER * times[plain] else plain


def print_gemms(
    times: Mapping[GemmImpl, float], name: str, weight: Tensor, rows: int, read: float
) -> None:
    floor = weight.nbytes / read / 1e6
    print(f"{name:8} {rows:>3} rows, floor {floor:6.1f} us")
    for gemm, us in times.items():
        mark = "*" if gemm is fastest(times) else " "
        print(
            f"  {mark} {us:7.1f} us {weight.nbytes / us / 1e6:5.2f} TB/s {floor / us:4.0%}  {gemm}"
        )


def cublas(name: str, x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def measure(sizes: ModelSizes, rows: int, weights: dict[str, list[Tensor]], read: float) -> None:
    times = {name: times_of(layers, rows) for name, layers in weights.items()}
    for name, found in times.items():
        print_gemms(found, name, weights[name][0], rows, read)
    gemms = {name: fastest(found) for name, found in times.items()}

    def chosen(name: str, x: Tensor, weight: Tensor) -> Tensor:
        return gemms[name].run(x, weight, None)

    chain, timer = Chain(sizes, weights, rows), GraphTimer(20)
    floor = sizes.nbytes() / read / 1e9
    subjects: dict[str, GemmFunction | None] = {"small kernels alone": None}
    for title, gemm in (subjects | {"cuBLAS": cublas, "chosen": chosen}).items():
        ms = time_one(timer, lambda _, gemm=gemm: chain.run(gemm)) / 1000
        print(f"step of {rows} rows, {title}: {ms:.3f} ms, floor {floor:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", choices=MODELS, default="qwen3-8b", help="whose shapes")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64], help="up to 64")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    sizes = MODELS[arguments.model]
    weights = random_weights(sizes, getattr(torch, arguments.dtype), "cuda")
    data = torch.randn(READ_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    read = measure_bandwidth(data, GraphTimer(10)).read
    print(f"{torch.cuda.get_device_name()}: reads {read:.2f} TB/s")
    for rows in arguments.rows:
        measure(sizes, rows, weights, read)


if __name__ == "__main__":
    main()
