"""On a GPU, the encoder in bfloat16 gives what it gives in float32, and large images fit."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.encoder.encoder_attention import KernelName, encoder_attention
from model_zoo.loader import fill_randomly
from model_zoo.vision import blocks
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


def test_images_that_are_encoded_together_have_the_features_of_each() -> None:
    half, _ = encoders()
    images = [picture(*size) for size in [(256, 512), (64, 64), (512, 480)]]
    for found, image in zip(half.encode_batch(images), images, strict=True):
        alone = half.encode(image)
        assert found.shape == alone.shape
        assert torch.cosine_similarity(found.float(), alone.float(), dim=-1).min() > 0.999


@pytest.mark.parametrize("kernel", ["varlen", "sdpa"])
def test_other_attention_gives_features_that_are_near(
    kernel: KernelName, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, _ = encoders()
    pixels = picture(512, 768)
    found = half.encode(pixels).float()
    monkeypatch.setattr(blocks, "encoder_attention", partial(encoder_attention, kernel=kernel))
    other = half.encode(pixels).float()
    assert torch.cosine_similarity(found, other, dim=-1).min() > 0.999


def test_gelu_in_the_epilogue_of_a_product_is_that_by_tanh() -> None:
    torch.manual_seed(4)
    with torch.device("cuda"):
        dense, x = blocks.Dense(64, 128, torch.float16), 3 * torch.randn(500, 64).half()
    fill_randomly(dense)
    dense.weight.normal_(std=0.3)
    expected = F.gelu(dense(x).double(), approximate="tanh")
    assert (dense.gelu_tanh(x).double() - expected).abs().max() <= 2e-3 * expected.abs().max()
