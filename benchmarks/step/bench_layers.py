"""Times the fused kernels of a layer on a GPU, and PyTorch's separate operations.

    python -m benchmarks.step.bench_layers [--shapes qwen3-8b] [--tokens 1,32] [--tune]

Each kernel runs in a CUDA graph over more buffers than the L2 cache holds, one call after the other
as in a step (chained), and separated by a kernel without dependent launch (isolated; its own time
is subtracted).  GB/s counts what must be read and written once.  norm_fp8 and gate_fp8 quantize
what add_norm and silu_mul compute; their `separate` is add_norm or silu_mul, then a kernel that
quantizes.  `--tune` times the kernels' possible configurations instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from attention.common.write_kv import write_kv
from attention.kv_pool import KVPool
from benchmarks.attention.timing import GraphTimer, Timer, isolated_timer
from benchmarks.shapes import SHAPES
from model_zoo.layers.kernels.add_rms_norm import add_rms_norm
from model_zoo.layers.kernels.embed import embed
from model_zoo.layers.kernels.qk_norm_rope_write import QKNormRopeConfig, qk_norm_rope_write
from model_zoo.layers.kernels.silu_mul import silu_mul
from model_zoo.layers.norm import RMSNorm
from model_zoo.layers.quantized_gemm.quantize_rows import (
    add_rms_norm_quantize,
    quantize_rows,
    silu_mul_quantize,
)
from model_zoo.layers.rope import Rope, rotate
from model_zoo.rope_config import RopeConfig

TOKENS = (1, 8, 32, 256, 2048)
COLD_BYTES = 200 << 20  # several times the L2 cache of an H100
MAX_SETS = 36  # as many as a model has layers
REPLAYS = 20
PAGE = 16
LayerCall = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class LayerShape:
    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int

    @property
    def columns(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


def shape_of(name: str) -> LayerShape:
    """Of a model in benchmarks/shapes."""
    config = SHAPES[name]
    return LayerShape(
        name,
        config["hidden_size"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
        config["intermediate_size"],
    )


@dataclass(frozen=True, slots=True)
class LayerSubject:
    """A kernel on `num_sets` sets of buffers; `variants` are other configurations of it."""

    name: str
    num_bytes: int
    num_sets: int
    fused: LayerCall
    separate: LayerCall
    variants: Mapping[str, LayerCall]


def sets_of(num_bytes: int) -> int:
    return max(2, min(MAX_SETS, -(-COLD_BYTES // num_bytes)))


def subjects(shape: LayerShape, tokens: int, device: torch.device) -> Iterator[LayerSubject]:
    of_layer = (rope_subject, norm_subject, gate_subject, norm_fp8_subject, gate_fp8_subject)
    for make in (*of_layer, embed_subject):
        yield make(shape, tokens, device)


def random(*sizes: int, device: torch.device) -> Tensor:
    return torch.randn(sizes, dtype=torch.bfloat16, device=device)


def norm_of(size: int, device: torch.device) -> RMSNorm:
    norm = RMSNorm(size, 1e-6, torch.bfloat16)
    norm.weight.normal_(1, 0.1)
    return norm.to(device)


def rope_subject(shape: LayerShape, tokens: int, device: torch.device) -> LayerSubject:
    """Norms, rotation and write, of each layer's own qkv and pages."""
    num_bytes = 2 * 2 * tokens * shape.columns
    count = sets_of(num_bytes)
    qkv = random(count, tokens, shape.columns, device=device)
    kv = KVPool.allocate(
        layers=count, pages=-(-tokens // PAGE) + 1, kv_heads=shape.kv_heads, page_size=PAGE,
        head_dim=shape.head_dim, dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    slots = torch.randperm(tokens, device=device)
    rope = Rope(RopeConfig(theta=1e6), shape.head_dim).to(device)
    cos_sin = rope.rows(torch.arange(tokens, device=device) + 1000, torch.bfloat16)
    q_norm, k_norm = norm_of(shape.head_dim, device), norm_of(shape.head_dim, device)

    def fused(i: int, config: QKNormRopeConfig | None = None) -> Tensor:
        return qk_norm_rope_write(
            qkv[i], kv.k[i], kv.v[i], slots, heads=shape.heads, cos_sin=cos_sin,
            q_weight=q_norm.weight, k_weight=k_norm.weight, eps=1e-6, config=config,
        )  # fmt: skip

    def separate(i: int) -> Tensor:
        heads = qkv[i].view(tokens, -1, shape.head_dim)
        q, k, v = heads.split([shape.heads, shape.kv_heads, shape.kv_heads], 1)
        q, k = rotate(q_norm(q), cos_sin), rotate(k_norm(k), cos_sin)
        write_kv(k, v, kv.k[i], kv.v[i], slots)
        return q

    variants = {
        f"{heads} heads, {warps} warps": partial(fused, config=QKNormRopeConfig(heads, warps))
        for heads, warps in ((1, 1), (2, 1), (4, 1), (4, 2), (8, 1), (8, 2), (16, 4), (32, 8))
    }
    return LayerSubject("rope", num_bytes, count, fused, separate, variants)


def norm_subject(shape: LayerShape, tokens: int, device: torch.device) -> LayerSubject:
    num_bytes = 2 * 4 * tokens * shape.hidden
    count = sets_of(num_bytes)
    x, residual = (random(count, tokens, shape.hidden, device=device) for _ in range(2))
    norms = [norm_of(shape.hidden, device) for _ in range(count)]

    def fused(i: int, num_warps: int | None = None) -> None:
        add_rms_norm(x[i], residual[i], norms[i].weight, 1e-6, num_warps=num_warps)

    def separate(i: int) -> Tensor:
        return norms[i](residual[i] + x[i])

    variants = {f"{w} warps": partial(fused, num_warps=w) for w in (1, 2, 4, 8, 16)}
    return LayerSubject("add_norm", num_bytes, count, fused, separate, variants)


def gate_subject(shape: LayerShape, tokens: int, device: torch.device) -> LayerSubject:
    num_bytes = 2 * 3 * tokens * shape.inner
    count = sets_of(num_bytes)
    gate_up = random(count, tokens, 2 * shape.inner, device=device)

    def separate(i: int) -> Tensor:
        gate, up = gate_up[i].chunk(2, -1)
        return F.silu(gate) * up

    def fused(i: int, **config: int) -> Tensor:
        return silu_mul(gate_up[i], **config)

    variants = {
        f"{block} by {warps}": partial(fused, block=block, num_warps=warps)
        for block, warps in ((512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8), (4096, 16))
    }
    return LayerSubject("silu_mul", num_bytes, count, fused, separate, variants)


def norm_fp8_subject(shape: LayerShape, tokens: int, device: torch.device) -> LayerSubject:
    """7 bytes a value: two are read, one is written in 16 bits and one in 8."""
    num_bytes = 7 * tokens * shape.hidden
    count = sets_of(num_bytes)
    x, residual = (random(count, tokens, shape.hidden, device=device) for _ in range(2))
    weights = [norm_of(shape.hidden, device).weight for _ in range(count)]

    def fused(i: int) -> None:
        add_rms_norm_quantize(x[i], residual[i], weights[i], 1e-6, "row")

    def separate(i: int) -> None:
        add_rms_norm(x[i], residual[i], weights[i], 1e-6)
        quantize_rows(x[i], "row")

    return LayerSubject("norm_fp8", num_bytes, count, fused, separate, {})


def gate_fp8_subject(shape: LayerShape, tokens: int, device: torch.device) -> LayerSubject:
    num_bytes = 5 * tokens * shape.inner
    count = sets_of(num_bytes)
    gate_up = random(count, tokens, 2 * shape.inner, device=device)

    def fused(i: int) -> tuple[Tensor, Tensor]:
        found = silu_mul_quantize(gate_up[i], "row")
        return found.codes.view(torch.uint8), found.scales

    def separate(i: int) -> tuple[Tensor, Tensor]:
        found = quantize_rows(silu_mul(gate_up[i]), "row")
        return found.codes.view(torch.uint8), found.scales

    return LayerSubject("gate_fp8", num_bytes, count, fused, separate, {})


def embed_subject(shape: LayerShape, tokens: int, device: torch.device) -> LayerSubject:
    """Of a step, not of a layer."""
    num_bytes = 2 * tokens * (3 * shape.hidden + shape.head_dim)
    weight = random(32_768, shape.hidden, device=device)
    count = sets_of(num_bytes)
    ids = torch.randint(len(weight), (count, tokens), device=device)
    positions = torch.randint(4096, (tokens,), device=device)
    rope = Rope(RopeConfig(theta=1e6), shape.head_dim).to(device)

    norm = norm_of(shape.hidden, device)

    def separate(i: int) -> tuple[Tensor, ...]:
        residual = F.embedding(ids[i], weight)
        return norm(residual), residual, rope.rows(positions, torch.bfloat16)

    def fused(i: int) -> tuple[Tensor, ...]:
        ropes = [(rope.frequencies, 1.0)]
        normed, residual, rows = embed(ids[i], positions, weight, norm.weight, 1e-6, ropes)
        return normed, residual, rows[0]

    return LayerSubject("embed", num_bytes, count, fused, separate, {})


def print_times(subject: LayerSubject, title: str, chained: Timer, isolated: Timer) -> None:
    calls = (subject.fused, subject.separate)
    captured = [chained.capture(call, subject.num_sets) for call in calls]
    fused, separate = (sample.us for sample in chained.replay(captured))
    alone = isolated.replay([isolated.capture(subject.fused, subject.num_sets)])[0].us
    rate = subject.num_bytes / fused / 1e3
    print(
        f"{title} {subject.name:<9} {fused:>8.2f} {alone:>8.2f} {separate:>9.2f} "
        f"{separate / fused:>6.1f}x {rate:>7.0f}",
        flush=True,
    )


def print_variants(subject: LayerSubject, title: str, chained: Timer) -> None:
    captured = [chained.capture(call, subject.num_sets) for call in subject.variants.values()]
    found = [f"{sample.us:.2f}" for sample in chained.replay(captured)]
    pairs = ", ".join(f"{name}: {us}" for name, us in zip(subject.variants, found, strict=True))
    print(f"{title} {subject.name:<9} {pairs}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="rows of a step")
    parser.add_argument("--shapes", default="qwen3-8b,qwen3-0.6b", help="of benchmarks/shapes")
    parser.add_argument("--tune", action="store_true", help="time every configuration")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    chained, isolated = GraphTimer(REPLAYS), isolated_timer(REPLAYS)
    if not arguments.tune:
        print(
            "shape       tokens kernel     chained isolated separate   gain    GB/s   (us a call)"
        )
    for shape in map(shape_of, arguments.shapes.split(",")):
        for tokens in map(int, arguments.tokens.split(",")):
            title = f"{shape.name:<11} {tokens:>6}"
            for subject in subjects(shape, tokens, device):
                if not arguments.tune:
                    print_times(subject, title, chained, isolated)
                elif subject.variants:
                    print_variants(subject, title, chained)


if __name__ == "__main__":
    main()
