"""Destinations of a checkpoint's tensors: parameters, or staging for layers to be converted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor

from model_zoo.checkpoint import CheckpointTensor

# Conversions need several times the memory of their layer for a moment: one at a time.
_converting = threading.Lock()


class Destination(Protocol):
    """Where a tensor of the checkpoint is copied to."""

    contiguous: bool

    def tensor(self) -> Tensor:
        """The device's tensor, in the checkpoint's shape; allocated at the first call."""
        ...

    def filled(self, num_bytes: int) -> StagedLayer | None:
        """So many bytes of the source have been queued to be copied.

        -> the layer that has all of its tensors now: the caller converts it, once.
        """
        ...


class Parameter:
    """A parameter, or some rows of one."""

    def __init__(self, place: Tensor) -> None:
        self._place, self.contiguous = place, place.is_contiguous()

    def tensor(self) -> Tensor:
        return self._place

    def filled(self, num_bytes: int) -> None:
        return None


class StagedTensor:
    """A tensor that its layer converts."""

    contiguous = True

    def __init__(self, source: CheckpointTensor, layer: StagedLayer) -> None:
        self.source, self.layer = source, layer
        self._tensor: Tensor | None = None
        self._allocated: torch.cuda.Event | None = None
        self._lock = threading.Lock()

    def tensor(self) -> Tensor:
        with self._lock:
            if self._tensor is None:
                source = self.source
                device = self.layer.device
                self._tensor = torch.empty(source.shape, dtype=source.dtype, device=device)
                if device.type == "cuda":
                    self._allocated = torch.cuda.Event()
                    self._allocated.record(torch.cuda.current_stream(device))
            return self._tensor

    def wait_allocated(self, stream: torch.cuda.Stream) -> None:
        """Let `stream` wait for the earlier uses of the memory, on the stream that allocated it."""
        if self._allocated is not None:
            stream.wait_event(self._allocated)

    def filled(self, num_bytes: int) -> StagedLayer | None:
        return self.layer.add_bytes(num_bytes)

    def release(self) -> None:
        self._tensor = None


class StagedLayer:
    """A linear layer of the checkpoint, stored in several tensors or in another form than it runs.

    Its tensors are on the device only from their first byte to the layer's conversion.
    """

    def __init__(
        self,
        sources: Mapping[str, CheckpointTensor],
        device: torch.device,
        convert: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        """sources: by the last part of their names; convert: stores them in parameters."""
        self.device = device
        self.tensors = {name: StagedTensor(source, self) for name, source in sources.items()}
        self._missing = sum(source.num_bytes for source in sources.values())
        self._convert = convert
        self._lock = threading.Lock()
        self.copied: list[torch.cuda.Event] = []  # of all copies; appended by several threads

    def largest(self) -> CheckpointTensor:
        """The tensor of the most bytes, such as the codes."""
        sources = [staged.source for staged in self.tensors.values()]
        return max(sources, key=lambda source: source.num_bytes)

    def add_bytes(self, num_bytes: int) -> StagedLayer | None:
        with self._lock:
            self._missing -= num_bytes
            return None if self._missing else self

    def convert(self) -> None:
        """Convert on the current stream, which has waited for `copied`, and free the tensors."""
        with torch.no_grad(), _converting:
            self._convert({name: staged.tensor() for name, staged in self.tensors.items()})
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
            for staged in self.tensors.values():
                staged.release()
