"""On a GPU, the encoder in bfloat16 gives what it gives in float32, and large images fit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from model_zoo.loader import fill_randomly
from model_zoo.vision.encoder import VisionEncoder
from model_zoo.vision.vision_config import VisionConfig

pytestmark = pytest.mark.gpu

PUBLISHED = VisionConfig(  # but for its depth
    depth=4, hidden_size=1152, intermediate_size=4304, num_heads=16, out_size=4096, patch_size=16,
    merge_size=2, frames=2, positions=48, deepstack_layers=(0, 2), mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)  # fmt: skip


def encoders() -> tuple[VisionEncoder, VisionEncoder]:
    """Of the same weights, in bfloat16 and in float32."""
    torch.manual_seed(3)
    with torch.device("cuda"):
        half = VisionEncoder(PUBLISHED, torch.bfloat16)
        full = VisionEncoder(PUBLISHED, torch.float32)
    fill_randomly(half)
    with torch.no_grad():
        for ours, theirs in zip(full.parameters(), half.parameters(), strict=True):
            ours.copy_(theirs)
    return half, full


def picture(height: int, width: int) -> Tensor:
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("size", [(64, 64), (1024, 1024), (96, 2048)])
def test_bfloat16_is_near_float32(size: tuple[int, int]) -> None:
    half, full = encoders()
    pixels = picture(*size)
    found, wanted = half.encode(pixels).float(), full.encode(pixels)
    for number in range(wanted.shape[1]):
        similar = torch.cosine_similarity(found[:, number], wanted[:, number], dim=-1)
        assert similar.min() > 0.999, f"features {number}: {similar.min()}"


def test_the_scores_of_a_large_image_are_never_in_memory() -> None:
    """16384 patches: those of one head alone would take 512 MiB in bfloat16, of a layer 8 GiB."""
    half, _ = encoders()
    pixels = picture(2048, 2048)
    half.encode(pixels)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert half.encode(pixels).isfinite().all()
    assert torch.cuda.max_memory_allocated() - before < 2 << 30


def test_an_image_is_encoded_to_the_same_bits_each_time() -> None:
    half, _ = encoders()
    pixels = picture(512, 768)
    first = half.encode(pixels)
    assert all(torch.equal(half.encode(pixels), first) for _ in range(5))
