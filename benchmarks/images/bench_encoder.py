"""Time of the image encoder on a GPU, and how near it is to what GEMMs reach.

    python -m benchmarks.images.bench_encoder [--images 16] [--side 1024]

The limit is the rate of a large GEMM in bfloat16 of PyTorch, timed here.
"""

from __future__ import annotations

import argparse
import time

import torch

from benchmarks.shapes.published import VISION
from model_zoo.loader import fill_randomly
from model_zoo.vision.encoder import VisionEncoder
from model_zoo.vision.vision_config import VisionConfig


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


def seconds_of(run: object, rounds: int) -> float:
    """The least of `rounds`, with the device idle before each."""
    assert callable(run)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--side", type=int, default=1024, help="pixels of an image's sides")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    config = published()
    with torch.device("cuda"):
        encoder = VisionEncoder(config, torch.bfloat16)
    fill_randomly(encoder)
    shape = args.images, args.side, args.side, 3
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda").unbind()
    encoder.encode(images[0])
    took = seconds_of(lambda: [encoder.encode(image) for image in images], args.rounds)
    gemms, scores = operations(config, (args.side // config.patch_size) ** 2)
    rate, limit = args.images * (gemms + scores) / took, gemm_rate()
    print(
        f"{args.images} images of {args.side} x {args.side}: {1000 * took / args.images:.2f} ms "
        f"each, {rate / 1e12:.0f} TFLOP/s ({gemms / 1e12:.2f} TFLOP of GEMMs and "
        f"{scores / 1e12:.2f} of attention an image), {100 * rate / limit:.0f} % of a GEMM's "
        f"{limit / 1e12:.0f}"
    )


if __name__ == "__main__":
    main()
