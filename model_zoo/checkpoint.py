"""Checkpoint: an index of the tensors in a directory's safetensors files."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model_zoo.config import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# What models and the readers of quantized weights understand, by its name in a file.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,  # of masks that older files have as buffers
}
GGUF = "*.gguf"
# Of the text model within a model that sees images -> of the text model alone.
INNER = (("model.language_model.", "model."), ("language_model.", ""))
MAX_NAMES = 5  # in an error message


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """One tensor on disk, or a part of one."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    num_bytes: int
    _opened: Any
    # Of a part: (begin, end) along one dimension, in order.  None: it is the whole tensor.
    dimension: int = 0
    ranges: tuple[tuple[int, int], ...] | None = None

    def __str__(self) -> str:
        return f"{self.path}: tensor {self.name}"

    @property
    def is_contiguous(self) -> bool:
        """Its bytes in the file are `num_bytes` from `offset` on."""
        return self.ranges is None or (self.dimension == 0 and len(self.ranges) == 1)

    def part(self, dimension: int, ranges: tuple[tuple[int, int], ...]) -> CheckpointTensor:
        """The part of a whole tensor that has these ranges of a dimension."""
        assert self.ranges is None and self.shape[dimension] >= max(end for _, end in ranges)
        shape, whole = list(self.shape), self.shape[dimension]
        shape[dimension] = sum(end - begin for begin, end in ranges)
        before = ranges[0][0] if dimension == 0 and len(ranges) == 1 else 0
        return replace(
            self,
            shape=tuple(shape),
            offset=self.offset + before * self.num_bytes // whole,
            num_bytes=self.num_bytes * shape[dimension] // whole,
            dimension=dimension,
            ranges=ranges,
        )

    def read(self) -> Tensor:
        """The tensor in the file's dtype, memory-mapped; of a part, that alone is read."""
        if self.ranges is None:
            return self._opened.get_tensor(self.name)
        return self.read_rows(0, self.shape[0])

    def read_rows(self, first: int, count: int) -> Tensor:
        """Some rows of a part of a tensor."""
        assert self.ranges is not None
        stored = self._opened.get_slice(self.name)
        if self.dimension == 0:
            found = [stored[begin:end] for begin, end in within(self.ranges, first, first + count)]
        else:
            skipped = (slice(None),) * (self.dimension - 1)
            rows = slice(first, first + count), *skipped
            found = [stored[(*rows, slice(begin, end))] for begin, end in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found, self.dimension)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """sources  by name, that of the text model's own repository: see text_model_name"""

    sources: dict[str, CheckpointTensor]

    @classmethod
    def open(cls, directory: Path) -> Self:
        """Read the headers of all files.

        Raises ModelError if files are missing, damaged, pickled or of dtypes that no weight has.
        """
        sources: dict[str, CheckpointTensor] = {}
        for path in find_files(directory):
            try:
                path.open("rb").close()  # safe_open reports an unreadable file as missing
            except OSError as error:
                raise ModelError(f"{path} cannot be read: {error.strerror}") from None
            try:
                opened: Any = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path}: damaged or cut short ({error}): download the file again"
                ) from None
            begin, header = _read_header(path)
            for name, entry in header.items():
                if name == "__metadata__":
                    continue
                if entry["dtype"] not in DTYPES:
                    raise ModelError(
                        f"{path}: tensor {name} is {entry['dtype']}: supported are "
                        f"{', '.join(DTYPES)}: use the model's unquantized weights"
                    )
                first, last = entry["data_offsets"]
                dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
                sources[text_model_name(name)] = CheckpointTensor(
                    path, name, dtype, shape, begin + first, last - first, opened
                )
        return cls(sources)


def within(ranges: tuple[tuple[int, int], ...], first: int, last: int) -> list[tuple[int, int]]:
    """Of the numbers in some ranges, in order, those in places first..last: as ranges."""
    found: list[tuple[int, int]] = []
    place = 0
    for begin, end in ranges:
        low, high = max(first - place, 0), min(last - place, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
        place += end - begin
    return found


def text_model_name(name: str) -> str:
    """A tensor's name in a repository of the text model alone.

    In one that sees images too, its layers are at `model.language_model.layers`, or in older files
    at `language_model.model.layers`.
    """
    for prefix, own in INNER:
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def _read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """-> (offset of the tensors' bytes, the header); `safe_open` has validated the file.

    The first eight bytes are the header's length (https://github.com/huggingface/safetensors#format).
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return 8 + length, json.loads(file.read(length))


def find_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: model.safetensors, those of the index, or all."""
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
    gguf = sorted(path.name for path in directory.glob(GGUF))
    if gguf:
        raise ModelError(
            f"{directory}: only GGUF files ({shorten(gguf)}), which are not supported: use this "
            "model's repository of safetensors files, unquantized or quantized in another format"
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
    """The first few names, and the number of the others."""
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def wrong_shape(source: CheckpointTensor, shape: tuple[int, ...]) -> str:
    """The sentence for a tensor of another shape than the model's."""
    return (
        f"{source} has shape {list(source.shape)}, config.json asks for {list(shape)}: they belong "
        "to different models, download both again"
    )
