"""Qwen3-VL computes what transformers computes, of text and of images, whole and in chunks."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_zoo.config import ModelError, read_config
from model_zoo.inputs import StepImages
from model_zoo.vision.positions import ImagePositions, ImageSpan
from runtime.messages import PromptImage
from tests.support.models.loaded_model import load_model
from tests.support.models.paged_forward import PagedRow
from tests.support.models.tiny_vision import (
    SIDE,
    VISION_KINDS,
    library_inputs,
    library_logits,
    picture,
    prompt_with,
    write_vision_checkpoint,
)
from tests.support.quantization.quantized_models import write_quantized_vision

CPU = torch.device("cpu")
TEXT = [5, 9, 17, 33, 2, 71, 8]
PROMPTS = {
    "text": prompt_with(TEXT * 5),
    "one": prompt_with(TEXT, picture(3, 5, 0), TEXT),
    "several": prompt_with(
        TEXT, picture(2, 2, 1), picture(6, 2, 2), TEXT * 2, picture(1, 7, 3), TEXT
    ),
    "first": prompt_with(picture(4, 4, 4), TEXT),
}


def spans_of(images: tuple[PromptImage, ...]) -> list[ImageSpan]:
    return [ImageSpan(one.start, one.height // SIDE, one.width // SIDE) for one in images]


def logits_in_steps(model, tokens: list[int], images: tuple[PromptImage, ...], cuts: list[int]):
    """[T, vocab]: each step gets the images that it overlaps, and the rope's positions."""
    positions = ImagePositions(spans_of(images))
    row = PagedRow(model, model.config, torch.float32)
    found: list[Tensor] = []
    for start, end in pairwise([0, *cuts, len(tokens)]):
        inside, features, index = positions.overlapping(start, end), [], torch.full((end,), -1)
        offset = 0
        for number in inside:
            image, span = images[number], positions.spans[number]
            pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
            features.append(model.encode(pixels.view(image.height, image.width, 3)))
            last = min(span.end, end)
            index[span.start : last] = torch.arange(offset, offset + last - span.start)
            offset += len(features[-1])
        triples = torch.from_numpy(positions.triples(start, end))
        step = StepImages(torch.cat(features), index[start:], triples) if inside else None
        found.append(row.feed(torch.tensor(tokens[start:end]), images=step, positions=triples[0]))
    return torch.cat(found)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("kind", VISION_KINDS)
def test_logits_equal_those_of_transformers(kind: str, name: str, tmp_path: Path) -> None:
    reference = write_vision_checkpoint(kind, tmp_path)
    model = load_model(read_config(tmp_path), tmp_path, dtype=torch.float32, device=CPU)
    tokens, images = PROMPTS[name]
    expected = library_logits(reference, tokens, images)
    for cuts in ([], [1, 10], [11, 12, len(tokens) - 1]):
        logits = logits_in_steps(model, tokens, images, cuts)
        assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("format", ["fp8-block", "awq", "int4-g128", "nvfp4"])
def test_the_text_model_may_be_quantized_and_the_encoder_is_not(
    format: str, experts: bool, tmp_path: Path
) -> None:
    reference = write_quantized_vision(tmp_path, format, experts=experts)
    model = load_model(read_config(tmp_path), tmp_path, dtype=torch.float32, device=CPU)
    tokens, images = PROMPTS["several"]
    expected = library_logits(reference, tokens, images)
    logits = logits_in_steps(model, tokens, images, [11])
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = write_vision_checkpoint("qwen3-vl", tmp_path)
    tokens, images = PROMPTS[name]
    inputs = library_inputs(tokens, images)
    expected, delta = reference.model.get_rope_index(  # type: ignore[union-attr, operator]
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs.get("image_grid_thw")
    )
    positions = ImagePositions(spans_of(images))
    triples = torch.from_numpy(positions.triples(0, len(tokens)))
    assert triples.tolist() == expected[:, 0].tolist()
    assert positions.delta(len(tokens)) == delta.item()
    for start, end in ((0, 5), (3, 11), (9, len(tokens))):
        assert positions.triples(start, end).tolist() == triples[:, start:end].tolist()


def changed(directory: Path, part: str, **fields: object) -> Path:
    """The checkpoint's config.json, with other fields in one of its objects."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config[part] |= fields
    path.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("part", "field", "value", "expected"),
    [
        ("vision_config", "out_hidden_size", 65, "the text model's hidden_size 64 is expected"),
        ("vision_config", "num_heads", 5, "a divisor of hidden_size 128"),
        ("vision_config", "deepstack_visual_indexes", [0, 7], "ascending blocks from 0 to 2"),
        ("vision_config", "num_position_embeddings", 65, "a square number is expected"),
        ("vision_config", "hidden_act", "relu", "supported: gelu_pytorch_tanh"),
    ],
)
def test_a_wrong_field_is_refused_by_name(
    part: str, field: str, value: object, expected: str, tmp_path: Path
) -> None:
    write_vision_checkpoint("qwen3-vl", tmp_path)
    with pytest.raises(ModelError, match=expected) as error:
        read_config(changed(tmp_path, part, **{field: value}))
    assert f"`{part}.{field}`" in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"), [("mrope_section", [6, 5, 6]), ("mrope_interleaved", False)]
)
def test_sections_that_do_not_fit_are_refused(field: str, value: object, tmp_path: Path) -> None:
    write_vision_checkpoint("qwen3-vl", tmp_path)
    rope = json.loads((tmp_path / "config.json").read_text())["text_config"]["rope_parameters"]
    with pytest.raises(ModelError, match=field):
        read_config(changed(tmp_path, "text_config", rope_parameters={**rope, field: value}))
