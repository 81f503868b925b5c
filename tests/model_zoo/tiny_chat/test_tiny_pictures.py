"""What trained the image encoder of tiny-chat: pictures, questions, and its own computation."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_zoo.config import read_config
from model_zoo.tiny_chat.training.images.batches import IGNORE, Batch, encode, make_batch
from model_zoo.tiny_chat.training.images.checkpoint import MODEL, join
from model_zoo.tiny_chat.training.images.dialogs import QUESTIONS, answers_of, any_dialog
from model_zoo.tiny_chat.training.images.drawing import draw
from model_zoo.tiny_chat.training.images.scenes import SKILLS, Item, Scene, any_scene
from model_zoo.tiny_chat.training.images.text_model import TextModel, text_weights
from model_zoo.tiny_chat.training.images.tower import TOKEN_SIDE, Tower
from model_zoo.vision.encoder import VisionEncoder
from runtime.messages import PromptImage
from tests.support.models.tiny_vision import library_logits

VISION, FLOAT, CPU = "model.visual.", torch.float32, torch.device("cpu")


def expanded(lines: list[str]) -> set[str]:
    return {line.lower() for line in lines}


def test_every_skill_has_questions_and_none_that_is_held_out_is_trained():
    assert set(QUESTIONS) == set(SKILLS)
    for phrasings in QUESTIONS.values():
        assert phrasings.held
        assert not expanded(phrasings.train) & expanded(phrasings.held)


def test_a_picture_is_the_same_for_a_seed_and_as_large_as_asked():
    for seed in range(20):
        scene = any_scene(Random(seed))
        one, other = (draw(scene, Random(seed), 160, 96) for _ in range(2))
        assert one.size == (160, 96) and one.tobytes() == other.tobytes()
        assert len(set(one.tobytes())) > 3


def test_a_question_with_several_answers_is_not_asked():
    red, blue = Item("star", "red"), Item("ring", "blue")
    assert Scene("shapes", (red, blue)).answers() == {"count": "2"}
    assert Scene("shapes", (red, red)).answers() == {"count": "2", "colour": "red", "shape": "star"}
    digit = Scene("digit", (Item("4", "blue"),))
    two = answers_of([Scene("shapes", (red,)), digit])
    assert two == {"count": "1", "shape": "star", "digit": "4"}


def test_tokens_of_pictures_are_numbered_in_order_and_only_answers_are_learned():
    random = Random(3)
    dialog = next(one for one in iter(lambda: any_dialog(random), None) if len(one.scenes) == 2)
    row = encode(dialog, 5, 4, 3)
    assert [one for one in row.index if one >= 0] == list(range(5 * 12, 7 * 12))
    assert [span.start for span in row.spans] == [
        place for place, one in enumerate(row.index) if one >= 0 and (one % 12) == 0
    ]
    learned = sum(label != IGNORE for label in row.labels)
    assert 0 < learned < 12 * len(dialog.segments)


@pytest.fixture(scope="module")
def joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a random encoder."""
    torch.manual_seed(4)
    folder = tmp_path_factory.mktemp("joined")
    save_file(Tower().state_dict(), folder / "encoder.safetensors")
    join(MODEL / "model.safetensors", folder / "encoder.safetensors", folder)
    return folder


def test_joining_leaves_the_text_model_as_it_is(joined: Path):
    before, after = (text_weights(one / "model.safetensors") for one in (MODEL, joined))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def tower_of(folder: Path) -> Tower:
    """In float32, of the encoder that is stored."""
    tower = Tower()
    stored = load_file(folder / "model.safetensors").items()
    tower.load_state_dict({n[len(VISION) :]: t for n, t in stored if n.startswith(VISION)})
    return tower


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (6, 10)])
def test_the_encoder_that_is_trained_is_the_one_that_is_served(
    joined: Path, rows: int, columns: int
):
    tower, config = tower_of(joined), read_config(joined).vision
    assert config is not None
    served = VisionEncoder(config, torch.float32)
    ours, theirs = served.weights(""), tower.state_dict()
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, parameter in ours.items():
            parameter.copy_(theirs[name])
    pixels = torch.randint(0, 256, (2, 16 * rows, 16 * columns, 3), dtype=torch.uint8)
    with torch.inference_mode():
        expected, _ = tower(pixels)
    for one, wanted in zip(pixels, expected, strict=True):
        torch.testing.assert_close(served.encode(one), wanted, atol=1e-4, rtol=1e-4)


def test_answers_are_trained_with_the_logits_of_transformers(joined: Path):
    """Of conversations with text before the pictures, with two of them, and of another size."""
    from transformers import AutoModelForImageTextToText

    reference = AutoModelForImageTextToText.from_pretrained(joined, dtype=torch.float32).eval()
    tower, text = tower_of(joined), TextModel(text_weights(joined / "model.safetensors"), FLOAT)
    pixels, _, tokens, labels, index, positions, _ = make_batch(Random(6), 4).tensors(CPU)
    per_image = pixels.shape[1] * pixels.shape[2] // TOKEN_SIDE**2
    with torch.inference_mode():
        features = tower(pixels)[0].flatten(0, 1)
        logits = text.logits(text(tokens, index, features, positions))
    for row in range(4):
        length = int((labels[row] != IGNORE).nonzero().max()) + 1
        starts = [at for at, one in enumerate(index[row]) if one >= 0 and one % per_image == 0]
        images = tuple(
            prompt_image(at, pixels[int(index[row, at]) // per_image], per_image) for at in starts
        )
        wanted = library_logits(reference, tokens[row, :length].tolist(), images)
        torch.testing.assert_close(logits[row, :length], wanted, atol=2e-3, rtol=1e-3)


def prompt_image(start: int, pixels: Tensor, num_tokens: int) -> PromptImage:
    height, width, _ = pixels.shape
    return PromptImage(start, num_tokens, width, height, pixels.numpy().tobytes(), b"")


def test_a_batch_that_was_written_is_read_as_it_was(tmp_path: Path):
    batch = make_batch(Random(8), 3)
    batch.write(tmp_path / "batch")
    again = Batch.read(tmp_path / "batch")
    pairs = zip(batch.arrays(), again.arrays(), strict=True)
    assert all((one == other).all() and one.dtype == other.dtype for one, other in pairs)
