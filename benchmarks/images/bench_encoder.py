"""Time of the image encoder on a GPU, and how near it is to what GEMMs reach.

    python -m benchmarks.images.bench_encoder [--only attention|encoder|graphs]

The limit is the rate of a large GEMM in bfloat16 of PyTorch, timed here.  Images are encoded
together and one by one, by our attention and by PyTorch's, and from a CUDA graph, which shows what
launches cost.  `graphs` is what an engine does with one image: by EncoderGraphs, before its graphs
are captured and after, beside VisionEncoder alone, which does not pad.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attention.encoder.encoder_attention import encoder_attention
from benchmarks.images.bench_encoder_attention import compare
from benchmarks.shapes.published import VISION
from model_zoo.loader import fill_randomly
from model_zoo.vision import blocks
from model_zoo.vision.encoder import VisionEncoder
from model_zoo.vision.vision_config import VisionConfig
from runtime.cuda_graph.encoder_graphs import EncoderGraphs, graph_rows
from runtime.cuda_graph.pool import GraphPool

CASES = ((16, 1024), (1, 1024), (16, 256), (1, 256), (1, 128))  # images, pixels of their sides
SIZES = (  # height and width in pixels of one image: 64 to 4,096 patches
    (128, 128), (256, 256), (288, 288), (320, 448), (384, 384), (512, 512), (544, 512),
    (1024, 1024),
)  # fmt: skip


def published() -> VisionConfig:
    return VisionConfig(
        depth=VISION["depth"],
        hidden_size=VISION["hidden_size"],
        intermediate_size=VISION["intermediate_size"],
        num_heads=VISION["num_heads"],
        out_size=4096,
        patch_size=VISION["patch_size"],
        merge_size=VISION["spatial_merge_size"],
        frames=VISION["temporal_patch_size"],
        positions=48,
        deepstack_layers=tuple(VISION["deepstack_visual_indexes"]),
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def operations(config: VisionConfig, patches: int) -> tuple[int, int]:
    """Multiplications and additions of an image: of the GEMMs, and of attention's scores."""
    size, inner = config.hidden_size, config.intermediate_size
    joined = size * config.merge_size**2
    block = 4 * size * size + 2 * size * inner
    merger = (joined * joined + joined * config.out_size) // config.merge_size**2
    mergers = merger * (1 + len(config.deepstack_layers))
    gemms = 2 * patches * (config.depth * block + mergers + config.patch_values * size)
    return gemms, 4 * config.depth * patches * patches * size


def seconds_of(run: Callable[[], object], rounds: int) -> float:
    """The least of `rounds`, with the device idle before each."""
    times: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times)


def gemm_rate() -> float:
    """Operations a second."""
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds_of(lambda: torch.mm(a, b), 10)


def replay_of(encoder: VisionEncoder, images: list[Tensor]) -> Callable[[], None]:
    """All stages as a CUDA graph, without what comes before the first block."""
    encoding = encoder.begin_batch(images)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        encoder.advance(encoding, encoder.num_stages)
    return graph.replay


def time_encoder(encoder: VisionEncoder, images: list[Tensor], rounds: int, limit: float) -> None:
    """Print milliseconds of all images, and the share of the limit."""
    side = images[0].shape[0]
    gemms, scores = operations(encoder.config, (side // encoder.config.patch_size) ** 2)
    print(f"{len(images)} images of {side} x {side}, {gemms / 1e12:.2f} TFLOP of GEMMs and "
          f"{scores / 1e12:.2f} of attention each:")  # fmt: skip

    def report(name: str, run: Callable[[], object]) -> None:
        run()
        took = seconds_of(run, rounds)
        rate = len(images) * (gemms + scores) / took
        print(f"  {name}: {1000 * took:.2f} ms, {rate / 1e12:.0f} TFLOP/s, "
              f"{100 * rate / limit:.0f} % of the limit", flush=True)  # fmt: skip

    report("together", lambda: encoder.encode_batch(images))
    report("one by one", lambda: [encoder.encode(image) for image in images])
    report("a graph of the stages", replay_of(encoder, images))
    ours = blocks.encoder_attention
    for kernel in ("varlen", "sdpa"):
        blocks.encoder_attention = partial(encoder_attention, kernel=kernel)
        report(f"together, by {kernel}", lambda: encoder.encode_batch(images))
    blocks.encoder_attention = ours


def encode(encoder: VisionEncoder | EncoderGraphs, image: Tensor, stages: int) -> Tensor:
    features = encoder.advance(encoder.begin(image), stages)
    assert features is not None
    return features


def compare_graphs(encoder: VisionEncoder, rounds: int) -> None:
    """Print a table of one image at a time: milliseconds as in an engine, and of how many rows."""
    device = torch.device("cuda", torch.cuda.current_device())
    shipped = EncoderGraphs(encoder, graph_rows(encoder.config, 4 << 20), device)
    images = [torch.randint(0, 256, (*size, 3), dtype=torch.uint8, device=device) for size in SIZES]
    stages = encoder.num_stages

    def times(one: VisionEncoder | EncoderGraphs) -> list[float]:
        """After a first time, whose kernels may have to be compiled."""
        runs = [partial(encode, one, image, stages) for image in images]
        return [(run(), 1000 * seconds_of(run, rounds))[1] for run in runs]

    alone, launched = times(encoder), times(shipped)
    features = [encode(shipped, image, stages) for image in images]
    began = time.perf_counter()
    shipped.capture(GraphPool(device))
    torch.cuda.synchronize()
    print(f"{len(shipped.captured)} graphs, captured in {time.perf_counter() - began:.2f} s")
    replayed = times(shipped)
    begin = [1000 * seconds_of(partial(shipped.begin, image), rounds) for image in images]
    print("      pixels  patches   rows    alone   padded    graph    begin   ms")
    for index, image in enumerate(images):
        same = torch.equal(encode(shipped, image, stages), features[index])
        assert same, "a graph gives other features"
        encoding, size = shipped.begin(image), f"{image.shape[0]} x {image.shape[1]}"
        took = (each[index] for each in (alone, launched, replayed, begin))
        columns = " ".join(f"{milliseconds:8.2f}" for milliseconds in took)
        print(f"{size:>12} {encoding.num_patches:8} {len(encoding.x):6} {columns}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("attention", "encoder", "graphs"))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    limit = gemm_rate()
    print(f"{torch.cuda.get_device_name()}: a GEMM runs at {limit / 1e12:.0f} TFLOP/s")
    if args.only in (None, "attention"):
        compare(args.rounds)
    if args.only == "attention":
        return
    with torch.device("cuda"):
        encoder = VisionEncoder(published(), torch.bfloat16)
    fill_randomly(encoder)
    if args.only != "encoder":
        compare_graphs(encoder, args.rounds)
    if args.only == "graphs":
        return
    for count, side in CASES:
        shape = count, side, side, 3
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda").unbind()
        time_encoder(encoder, list(images), args.rounds, limit)


if __name__ == "__main__":
    main()
