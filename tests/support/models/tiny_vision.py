"""Small random checkpoints of models that read images, and prompts as transformers takes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from runtime.messages import PromptImage
from tests.support.models.tiny_checkpoints import HYBRID_SHAPE, SHAPE

SIDE = 32  # pixels of a token's side
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 127, 128, 129, 130
TEXT = {**SHAPE, "head_dim": 32, "max_position_embeddings": 2048, "num_hidden_layers": 4}
VISION = {
    "depth": 3,
    "hidden_size": 128,  # heads of 64, which our kernels serve
    "intermediate_size": 80,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 4096, "longest_edge": 262144},
}
HYBRID_VISION_KINDS = ("qwen3.5", "qwen3.5-moe")
VISION_KINDS = ("qwen3-vl", "qwen3-vl-tied", "qwen3-vl-moe", *HYBRID_VISION_KINDS)
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}


def _hybrid_config(kind: str, text_changes: Mapping[str, Any], ids: Mapping[str, int]):
    from transformers import Qwen3_5Config, Qwen3_5MoeConfig

    text = {**HYBRID_SHAPE, "max_position_embeddings": 2048, **text_changes}
    vision = {name: value for name, value in VISION.items() if not name.startswith("deepstack")}
    if kind == "qwen3.5":  # the last layer has a state
        text |= {"num_hidden_layers": 5}
        return Qwen3_5Config(text_config=text, vision_config=vision, **ids)
    text |= {**EXPERTS, "shared_expert_intermediate_size": 40}
    return Qwen3_5MoeConfig(text_config=text, vision_config=vision, **ids)


def _config(kind: str, text_changes: Mapping[str, Any], image_token_id: int):
    from transformers import Qwen3VLConfig, Qwen3VLMoeConfig

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    text: dict[str, Any] = {**TEXT, "rope_parameters": {**rope, "mrope_interleaved": True}}
    text |= text_changes
    ids = {
        "image_token_id": image_token_id, "video_token_id": VIDEO_PAD,
        "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END,
    }  # fmt: skip
    if kind in HYBRID_VISION_KINDS:
        return _hybrid_config(kind, text_changes, ids)
    tied = kind == "qwen3-vl-tied"
    text["tie_word_embeddings"] = tied
    if kind == "qwen3-vl-moe":
        text |= EXPERTS
        return Qwen3VLMoeConfig(text_config=text, vision_config=VISION, **ids)
    if tied:  # all three features go to a model of as many layers
        text |= {"num_hidden_layers": 3}
        vision = {**VISION, "deepstack_visual_indexes": [0, 1, 2]}
        return Qwen3VLConfig(
            text_config=text, vision_config=vision, tie_word_embeddings=True, **ids
        )
    return Qwen3VLConfig(text_config=text, vision_config=VISION, **ids)


def write_vision_checkpoint(
    kind: str, directory: Path, *, image_token_id: int = IMAGE_PAD, **text: Any
) -> nn.Module:
    """Write a checkpoint of `kind`; return transformers' model of it, in float32.

    text: other fields of the text model
    """
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(VISION_KINDS.index(kind))
    config = _config(kind, text, image_token_id)
    model = AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    if kind == "qwen3-vl-moe":
        _transpose_experts(directory / "model.safetensors")
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def _transpose_experts(path: Path) -> None:
    """As published files have them; transformers reads both forms, and writes the other."""
    tensors = load_file(path)
    for name in tensors:
        if ".experts." in name:
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def picture(rows: int, columns: int, seed: int) -> Tensor:
    """uint8 [height, width, 3] of noise, as many tokens high and wide."""
    noise = torch.Generator().manual_seed(seed)
    shape = rows * SIDE, columns * SIDE, 3
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise)


def prompt_with(*parts: list[int] | Tensor) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Texts and pictures in turn -> the prompt's tokens and images, as the server sends them."""
    tokens: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, list):
            tokens += part
            continue
        height, width, _ = part.shape
        count, pixels = height * width // SIDE**2, part.numpy().tobytes()
        tokens.append(VISION_START)
        digest = hashlib.sha256(f"{width}x{height}".encode() + pixels).digest()
        images.append(PromptImage(len(tokens), count, width, height, pixels, digest))
        tokens += [IMAGE_PAD] * count + [VISION_END]
    return tokens, tuple(images)


def library_inputs(tokens: list[int], images: tuple[PromptImage, ...]) -> dict[str, Tensor]:
    """The same prompt for transformers, pixels by its own processor."""
    ids = torch.tensor([tokens])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": _types(tokens, images),
    }
    if not images:
        return inputs
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    options = {name: value for name, value in PROCESSOR.items() if name != "image_processor_type"}
    processor = Qwen2VLImageProcessorPil(**options)
    pictures = [
        torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
        .view(image.height, image.width, 3)
        .numpy()
        for image in images
    ]
    prepared = processor(images=pictures, return_tensors="pt")
    return {
        **inputs,
        "pixel_values": prepared["pixel_values"],
        "image_grid_thw": prepared["image_grid_thw"],
    }


def _types(tokens: list[int], images: tuple[PromptImage, ...]) -> Tensor:
    types = torch.zeros(1, len(tokens), dtype=torch.int32)
    for image in images:
        types[0, image.start : image.start + image.num_tokens] = 1
    return types


def library_logits(model: nn.Module, tokens: list[int], images: tuple[PromptImage, ...]) -> Tensor:
    """[T, vocab] of the prompt."""
    with torch.inference_mode():
        return model(**library_inputs(tokens, images)).logits[0].float()


def library_tokens(
    model: nn.Module, tokens: list[int], images: tuple[PromptImage, ...], answer: list[int]
) -> list[int]:
    """The greedy ones after the prompt and after each token but the last of an answer: the answer
    itself, if it is library_answer()."""
    logits = library_logits(model, tokens + answer[:-1], images)
    return logits[len(tokens) - 1 :].argmax(-1).tolist()


def library_answer(
    model: Any, tokens: list[int], images: tuple[PromptImage, ...], count: int
) -> list[int]:
    """The greedy tokens."""
    generated = model.generate(
        **library_inputs(tokens, images),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    return generated[0, len(tokens) :].tolist()
