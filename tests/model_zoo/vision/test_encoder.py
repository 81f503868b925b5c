"""The image encoder computes what transformers' Qwen3VLVisionModel computes."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from attention.encoder.encoder_attention import KernelName, encoder_attention
from model_zoo.vision import blocks
from model_zoo.vision.encoder import VisionEncoder
from model_zoo.vision.patches import image_patches
from model_zoo.vision.vision_config import VisionConfig

SHAPE = {"depth": 4, "hidden_size": 48, "intermediate_size": 80, "num_heads": 4}
GRIDS = [(4, 4), (2, 2), (2, 10), (14, 6), (26, 18), (8, 2)]  # smaller and larger than positions


def pair(**changes: int) -> tuple[VisionEncoder, Qwen3VLVisionModel]:
    """An encoder and transformers' model, of the same random weights."""
    torch.manual_seed(5)
    reference = Qwen3VLVisionModel(
        Qwen3VLVisionConfig(
            **{**SHAPE, **changes}, out_hidden_size=64, num_position_embeddings=256,
            deepstack_visual_indexes=[0, 2],
        )
    ).eval()  # fmt: skip
    shape = {**SHAPE, **changes}
    config = VisionConfig(
        **shape, out_size=64, patch_size=16, merge_size=2, frames=2, positions=16,
        deepstack_layers=(0, 2),
    )  # fmt: skip
    encoder = VisionEncoder(config, torch.float32)
    stored = reference.state_dict()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        ours = encoder.weights("")
        assert ours.keys() == stored.keys()
        for name, parameter in ours.items():
            parameter.copy_(stored[name])
    return encoder, reference


def expected(reference: Qwen3VLVisionModel, patches: torch.Tensor, grid: list[list[int]]):
    """[tokens, 1 + deepstack, out] of the images together."""
    with torch.inference_mode():
        found = reference(patches, torch.tensor(grid))
    return torch.stack([found.pooler_output, *found.deepstack_features], 1)


@pytest.mark.parametrize("grid", GRIDS)
def test_features_equal_those_of_transformers(grid: tuple[int, int]) -> None:
    encoder, reference = pair()
    rows, columns = grid
    patches = torch.randn(rows * columns, encoder.config.patch_values)
    with torch.inference_mode():
        features = encoder(patches, rows, columns)
    wanted = expected(reference, patches, [[1, rows, columns]])
    assert features.shape == (rows * columns // 4, 3, 64)
    assert (features - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_heads_of_72_values_as_published_models_have_them() -> None:
    encoder, reference = pair(hidden_size=144, num_heads=2)
    patches = torch.randn(6 * 4, encoder.config.patch_values)
    with torch.inference_mode():
        features = encoder(patches, 6, 4)
    wanted = expected(reference, patches, [[1, 6, 4]])
    assert (features - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_one_by_one_images_have_the_features_that_transformers_gives_to_all() -> None:
    encoder, reference = pair()
    sizes = [(4, 6), (2, 2), (8, 4)]
    patches = [torch.randn(rows * columns, encoder.config.patch_values) for rows, columns in sizes]
    with torch.inference_mode():
        features = torch.cat(
            [encoder(one, *size) for one, size in zip(patches, sizes, strict=True)]
        )
    wanted = expected(reference, torch.cat(patches), [[1, *size] for size in sizes])
    assert (features - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def test_an_image_is_encoded_as_transformers_processes_and_encodes_it(tmp_path: Path) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    encoder, reference = pair()
    pixels = torch.randint(0, 256, (96, 128, 3), dtype=torch.uint8)
    processor = Qwen2VLImageProcessorPil(
        patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3,
        size={"shortest_edge": 1024, "longest_edge": 65536},
    )  # fmt: skip
    prepared = processor(images=[pixels.numpy()], return_tensors="pt")
    assert prepared["image_grid_thw"].tolist() == [[1, 6, 8]]
    wanted = expected(reference, prepared["pixel_values"], [[1, 6, 8]])
    features = encoder.encode(pixels)
    assert (features - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("cuts", [(1,) * 5, (2, 3), (4, 1), (1, 1, 3), (5,)])
def test_stages_that_run_one_after_the_other_give_the_same_bits(cuts: tuple[int, ...]) -> None:
    encoder, _ = pair()
    pixels = torch.randint(0, 256, (128, 192, 3), dtype=torch.uint8)
    assert encoder.num_stages == sum(cuts) == len(encoder.config.stage_operations)
    encoding, found = encoder.begin(pixels), None
    for stages in cuts:
        assert found is None
        encoder.encode(pixels.flip(0))  # another image in between
        found = encoder.advance(encoding, stages)
    assert found is not None and torch.equal(found, encoder.encode(pixels))


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_images_that_are_encoded_together_have_the_features_of_each(
    kernel: KernelName, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 72 values, by PyTorch's attention and by the kernel, interpreted on a CPU."""
    if kernel == "varlen" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=1 would interpret them")
    attention = partial(encoder_attention, kernel=kernel)
    monkeypatch.setattr(blocks, "encoder_attention", attention)
    encoder, reference = pair(hidden_size=144, num_heads=2)
    sizes = [(64, 96), (32, 32), (96, 160)]
    images = [torch.randint(0, 256, (*size, 3), dtype=torch.uint8) for size in sizes]
    patches = torch.cat([image_patches(image, encoder.spec) for image in images])
    wanted = expected(
        reference, patches, [[1, rows // 16, columns // 16] for rows, columns in sizes]
    )
    found = encoder.encode_batch(images)
    assert [len(one) for one in found] == [rows * columns // 1024 for rows, columns in sizes]
    assert (torch.cat(found) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
