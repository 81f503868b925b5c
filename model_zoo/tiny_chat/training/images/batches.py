"""Batches of conversations about pictures, drawn by worker processes without end."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from queue import Empty, Queue
from random import Random
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from model_zoo.vision.positions import ImagePositions, ImageSpan

from .dialogs import IMAGE, PictureDialog, any_dialog
from .drawing import draw
from .scenes import COLOURS, KINDS, MOST, SHAPES, SKILLS, WORDS, Scene
from .tower import TOKEN_SIDE

MODEL = Path(__file__).parents[2]
IGNORE = -100
# Width and height; pictures of other sizes are resized before the model sees them.
SIZES = ((128, 128), (160, 128), (128, 160), (128, 96), (96, 128), (160, 96))
SIZE_WEIGHTS = (10, 1, 1, 1, 1, 1)
MAX_TOKENS = 160  # of a conversation, those of images included
CLASSES: dict[str, tuple[str, ...]] = {
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "count": tuple(map(str, range(1, MOST + 1))),
    "digit": tuple(str(digit) for digit in range(10)),
    "word": WORDS,
    "kind": KINDS,
}


@dataclass(frozen=True)
class Batch:
    """B conversations about M pictures of one size."""

    pixels: NDArray[np.uint8]  # [M, height, width, 3]
    classes: NDArray[np.int16]  # [M, 6]: of CLASSES, IGNORE where a picture has none
    tokens: NDArray[np.int16]  # [B, T], padded on the right
    labels: NDArray[np.int16]  # [B, T], IGNORE where nothing is learned
    index: NDArray[np.int32]  # [B, T]: of all M * N tokens of pictures, -1 for text
    positions: NDArray[np.int16]  # [3, B, T]
    skills: NDArray[np.int16]  # [B]: of SKILLS, of the last question

    def arrays(self) -> tuple[NDArray[Any], ...]:
        return (
            self.pixels, self.classes, self.tokens, self.labels,
            self.index, self.positions, self.skills,
        )  # fmt: skip

    def tensors(self, device: torch.device) -> list[Tensor]:
        """In the order of `arrays`: pixels stay uint8, the others are int64."""
        pixels, *others = (torch.from_numpy(one).to(device) for one in self.arrays())
        return [pixels, *(one.long() for one in others)]

    def write(self, path: Path) -> None:
        with path.open("wb") as file:
            for one in self.arrays():
                np.save(file, one)

    @classmethod
    def read(cls, path: Path) -> Batch:
        with path.open("rb") as file:
            return cls(*(np.load(file) for _ in fields(cls)))


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


@dataclass
class Row:
    tokens: list[int]
    labels: list[int]
    index: list[int]
    spans: list[ImageSpan]


def encode(dialog: PictureDialog, first: int, rows: int, columns: int) -> Row:
    """rows, columns: of a picture's tokens; first: how many pictures the batch has before."""
    row = Row([], [], [], [])
    per_image = rows * columns
    before, after = IMAGE.split("<|image_pad|>")
    pad = _tokenizer().token_to_id("<|image_pad|>")
    assert pad is not None

    def add(text: str, learned: bool) -> None:
        ids = _tokenizer().encode(text).ids
        row.tokens += ids
        row.labels += ids if learned else [IGNORE] * len(ids)
        row.index += [-1] * len(ids)

    for segment, learned in dialog.segments:
        for number, text in enumerate(segment.split(IMAGE)):
            if number:
                add(before, False)
                begin = (first + len(row.spans)) * per_image
                row.spans.append(ImageSpan(len(row.tokens), rows, columns))
                row.tokens += [pad] * per_image
                row.labels += [IGNORE] * per_image
                row.index += range(begin, begin + per_image)
                add(after, False)
            add(text, learned)
    return row


def classes_of(scene: Scene) -> list[int]:
    known = {**scene.answers(), "kind": scene.kind}
    return [
        values.index(known[name]) if name in known else IGNORE for name, values in CLASSES.items()
    ]


def make_batch(
    random: Random,
    size: int,
    easy: bool = False,
    held: bool = False,
    least: int = 1,
    most: int = MAX_TOKENS,
) -> Batch:
    """size: conversations, each of `least` to `most` tokens; easy, held: as any_dialog"""
    width, height = random.choices(SIZES, SIZE_WEIGHTS)[0] if not easy else SIZES[0]
    grid = height // TOKEN_SIDE, width // TOKEN_SIDE
    found: list[Row] = []
    scenes: list[Scene] = []
    skills: list[int] = []
    while len(found) < size:
        dialog = any_dialog(random, easy, held)
        row = encode(dialog, len(scenes), *grid)
        if least <= len(row.tokens) <= most:
            found.append(row)
            scenes += dialog.scenes
            skills.append(SKILLS.index(dialog.skill))
    length = max(len(row.tokens) for row in found)
    tokens, labels = np.zeros((size, length), np.int16), np.full((size, length), IGNORE, np.int16)
    index, positions = np.full((size, length), -1, np.int32), np.zeros((3, size, length), np.int16)
    for at, row in enumerate(found):
        end = len(row.tokens)
        tokens[at, :end], labels[at, :end] = row.tokens, row.labels
        index[at, :end] = row.index
        positions[:, at, :end] = ImagePositions(row.spans).triples(0, end)
    pixels = np.stack([np.asarray(draw(scene, random, width, height)) for scene in scenes])
    classes = np.array([classes_of(scene) for scene in scenes], np.int16)
    return Batch(pixels, classes, tokens, labels, index, positions, np.array(skills, np.int16))


def _produce(queue: Any, folder: Path, seed: int, size: int, easy: bool) -> None:
    """Worker process: write batches and put their files, for ever."""
    torch.set_num_threads(1)
    random = Random(seed)
    for number in count():
        path = folder / f"{seed}-{number}"
        make_batch(random, size, easy).write(path)
        queue.put(path)


class Batches:
    """Of `workers` processes, without end, as tensors on a device.

    Batches go through files: pipes are slower, and shared memory may be small.  Where no new batch
    is ready, one of the last `keep` is drawn again.
    """

    def __init__(
        self, workers: int, size: int, seed: int, easy: bool, device: torch.device, keep: int = 96
    ) -> None:
        self._folder = TemporaryDirectory(ignore_cleanup_errors=True)
        self._random, self._recent, self._keep = Random(seed), list[list[Tensor]](), keep
        self._ready: Queue[list[Tensor]] = Queue(4)
        context = get_context("spawn")
        self._paths = context.Queue(maxsize=workers)
        self.fresh = 0  # so many batches were new
        for number in range(workers):
            arguments = (self._paths, Path(self._folder.name), seed + number, size, easy)
            context.Process(target=_produce, args=arguments, daemon=True).start()
        Thread(target=self._load, args=(device,), daemon=True).start()

    def next(self) -> list[Tensor]:
        try:
            wait = 120 if len(self._recent) < 4 else 0
            batch = self._ready.get(timeout=wait) if wait else self._ready.get_nowait()
        except Empty:
            return self._random.choice(self._recent)
        self.fresh += 1
        self._recent = [*self._recent[1 - self._keep :], batch]
        return batch

    def _load(self, device: torch.device) -> None:
        while True:
            path = self._paths.get()
            self._ready.put(Batch.read(path).tensors(device))
            path.unlink()
