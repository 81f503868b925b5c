"""Checkpoint: the tensors of a directory's safetensors files, read through mmap."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_zoo.config import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
FLOATS = ("F64", "F32", "F16", "BF16")
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Source:
    """One tensor on disk."""

    path: Path
    name: str
    shape: tuple[int, ...]
    _opened: Any

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name}"

    def read(self) -> Tensor:
        """The tensor in the type of the file; a view of the file."""
        return self._opened.get_tensor(self.name)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    sources: dict[str, Source]

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read the headers.

        Raises ModelError if files are missing, damaged, pickled or of quantized weights.
        """
        sources: dict[str, Source] = {}
        for path in find_files(directory):
            try:
                opened: Any = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path}: damaged or cut short ({error}): download the file again"
                ) from None
            for name in opened.keys():  # noqa: SIM118 - not a dict
                part = opened.get_slice(name)
                if part.get_dtype() not in FLOATS:
                    raise ModelError(
                        f"{path}: tensor {name} is {part.get_dtype()}: supported are "
                        f"{', '.join(FLOATS)}: use the model's unquantized weights"
                    )
                sources[name] = Source(path, name, tuple(part.get_shape()), opened)
        return cls(sources)


def find_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the one of the usual name, or those of the index."""
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    if (directory / INDEX).is_file():
        return _indexed(directory / INDEX)
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(path.name for pattern in PICKLES for path in directory.glob(pattern))
    if pickles:
        raise ModelError(
            f"{directory}: only pickled weights ({shorten(pickles)}), which can run code when they "
            "are read: convert them to safetensors, or use a repository that has them"
        )
    raise ModelError(f"{directory}: no *.safetensors file: download the model's weights")


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [index.with_name(name) for name in names]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a safetensors index: {error!r}") from None
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise ModelError(
            f"{index}: names files that are not there: {shorten(absent)}: the download is not "
            "complete"
        )
    return files


def shorten(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
