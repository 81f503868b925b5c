"""The benchmarks of images: their model directory is served as Qwen3-VL, and no image repeats."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.images.bench_encoder import operations, published
from benchmarks.images.bench_images import picture_url
from benchmarks.shapes import write_model
from benchmarks.shapes.vision import MARKS
from model_zoo.config import read_config
from model_zoo.vision.encoder import VisionEncoder


def test_the_shape_is_read_as_published(tmp_path: Path) -> None:
    config = read_config(write_model("qwen3-vl-8b", tmp_path))
    assert config.vision is not None and config.vision.depth == 27
    assert config.num_layers == 36 and config.rope is not None
    assert config.rope.sections == (24, 20, 20)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("".join(MARKS)).ids == [300, 301, 302]
    assert tokenizer.get_vocab_size() == config.vocab_size == 151_936


def test_a_shape_can_be_cut_and_stays_as_it_is(tmp_path: Path) -> None:
    cut = read_config(write_model("qwen3-vl-8b", tmp_path / "cut", layers=3, blocks=2))
    assert cut.vision is not None and (cut.num_layers, cut.vision.depth) == (3, 2)
    assert cut.vision.deepstack_layers == (1,)
    assert read_config(write_model("qwen3-vl-8b", tmp_path / "whole")).num_layers == 36


def test_operations_are_those_of_the_encoders_weights() -> None:
    """Each weight of a Linear is used once for each row that goes through it."""
    config = published()
    with torch.device("meta"):
        encoder = VisionEncoder(config, torch.bfloat16)
    patches = 4096
    of_blocks = sum(each.numel() for each in encoder.blocks.parameters() if each.dim() == 2)
    mergers = [encoder.merger, *encoder.deepstack_mergers]
    of_mergers = sum(
        each.numel() for merger in mergers for each in merger.parameters() if each.dim() == 2
    )
    embedding = encoder.patch_embedding.weight.numel()
    wanted = 2 * (patches * (of_blocks + embedding) + patches // 4 * of_mergers)
    assert operations(config, patches)[0] == wanted


def test_every_picture_is_another() -> None:
    urls = {picture_url(64, kind, number) for kind in ("PNG", "JPEG") for number in range(3)}
    assert len(urls) == 6
