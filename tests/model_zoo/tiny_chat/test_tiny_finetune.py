"""The second stage of tiny-chat's training with images: the text model and the mergers together."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save_file

from model_zoo.tiny_chat.training.images.batches import IGNORE, make_batch
from model_zoo.tiny_chat.training.images.checkpoint import MODEL, join
from model_zoo.tiny_chat.training.images.finetune import Finetuning, Replay, arguments, padded
from model_zoo.tiny_chat.training.images.text_model import TextModel, text_weights
from model_zoo.tiny_chat.training.images.tower import Tower

FEW = ["--no-compile", "--tokens", "160", "--warmup", "1"]


@pytest.fixture
def stage(tmp_path: Path) -> Finetuning:
    """With a random encoder, and steps of a few short conversations."""
    torch.manual_seed(5)
    encoder = tmp_path / "encoder.safetensors"
    save_file(Tower().state_dict(), encoder)
    out = tmp_path / "out"
    return Finetuning(arguments().parse_args([str(encoder), "--out", str(out), *FEW]))


def test_text_without_images_needs_only_its_tokens():
    text = TextModel(text_weights(MODEL / "model.safetensors"), torch.float32)
    tokens, nothing = torch.randint(0, 4000, (2, 7)), torch.zeros(0, 4, 256)
    index, positions = torch.full((2, 7), -1), torch.arange(7).expand(3, 2, 7)
    with torch.no_grad():
        alone, other = text(tokens), text(tokens, index, nothing, positions)
    torch.testing.assert_close(alone, other)


def test_conversations_of_text_come_in_a_few_padded_lengths():
    replay = Replay(1, 400)
    for _ in range(5):
        tokens, labels = replay.next()
        assert tokens.shape == labels.shape and tokens.shape[1] in (96, 192, 384, 1024)
        assert 400 <= tokens.numel() < 400 + tokens.shape[1]
        learned = labels != IGNORE
        assert learned.any() and (tokens[learned] == labels[learned]).all()


def test_batches_that_are_padded_learn_the_same():
    parts = make_batch(Random(2), 3, least=30, most=64).tensors(torch.device("cpu"))
    longer = padded(parts, 96)
    for name in (2, 3, 4, 5):
        assert longer[name].shape[-1] == 96
        assert torch.equal(longer[name][..., : parts[name].shape[-1]], parts[name])
    assert (longer[3] != IGNORE).sum() == (parts[3] != IGNORE).sum()
    assert (longer[4] >= 0).sum() == (parts[4] >= 0).sum()


def test_text_is_held_to_what_the_model_said_before(stage: Finetuning):
    tokens, labels = stage.replay.next()
    before = stage._text_loss(tokens, labels).item()
    with torch.no_grad():
        for parameter in stage.text.parameters():
            parameter.mul_(1.1)
    assert before == pytest.approx(0, abs=1e-6)
    assert stage._text_loss(tokens, labels).item() > 0.01


def test_a_step_trains_the_text_model_and_the_mergers_and_no_block(stage: Finetuning):
    before = {name: one.clone() for name, one in stage.tower.state_dict().items()}
    stage._step(0, 0.0)
    for name, one in stage.tower.state_dict().items():
        assert torch.equal(one, before[name]) != ("merger" in name), name
    old = text_weights(MODEL / "model.safetensors")
    changed = [
        not torch.equal(getattr(stage.text, of), old[n]) for n, of in stage.text.names.items()
    ]
    assert all(changed)


def test_what_is_saved_is_joined_to_a_checkpoint(stage: Finetuning, tmp_path: Path):
    stage.save()
    out = stage.args.out
    join(out / "text.safetensors", out / "encoder.safetensors", tmp_path)
    old, new = (text_weights(one / "model.safetensors") for one in (MODEL, tmp_path))
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in old)
