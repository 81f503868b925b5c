"""WeightReader: reads weights from files into parameters on a GPU, with several threads.

Each thread reads chunks into its own pinned buffers, and queues a copy of each chunk
to its parameter on its own stream.  So reads are parallel, reading and copying overlap, and the
host needs THREADS * BUFFERS * CHUNK_BYTES of memory for a model of any size.  The device converts
where the dtypes of file and parameter differ.

The page cache gives a thread about 5 GB/s, disks need several requests in flight, and the link to
the GPU takes 25 to 50 GB/s: eight threads come near the lowest of these.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from model_zoo.checkpoint import CheckpointTensor
from model_zoo.config import ModelError
from model_zoo.staging import Destination, StagedLayer, StagedTensor

THREADS = 8
BUFFERS = 2  # per thread: one is filled while the other is copied
CHUNK_BYTES = 8 << 20
REPORT_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class WeightTarget:
    """A tensor on disk, and where it belongs."""

    source: CheckpointTensor
    destination: Destination

    @property
    def by_rows(self) -> bool:
        """It is cut between rows only."""
        return not (self.source.is_contiguous and self.destination.contiguous)


@dataclass(frozen=True, slots=True)
class WeightChunk:
    """Some rows, or elements, of a tensor on disk."""

    target: WeightTarget
    offset: int  # in the file
    num_bytes: int
    first: int
    count: int

    @property
    def source(self) -> CheckpointTensor:
        return self.target.source

    def place(self) -> Tensor:
        """The slice of the destination that the chunk fills."""
        tensor = self.target.destination.tensor()
        tensor = tensor if self.target.by_rows else tensor.view(-1)
        return tensor[self.first : self.first + self.count]


def in_reading_order(targets: Iterable[WeightTarget]) -> list[WeightTarget]:
    """In file order, but for layers that are converted: they are read whole.

    Files are sorted by dtype, so that all codes come before the first scale, and all layers would
    be on the device in both forms.
    """

    def place(target: WeightTarget) -> tuple[Path, int, Path, int]:
        source, destination = target.source, target.destination
        first = destination.layer.largest() if isinstance(destination, StagedTensor) else source
        return first.path, first.offset, source.path, source.offset

    return sorted(targets, key=place)


def weight_chunks(targets: Iterable[WeightTarget], max_bytes: int) -> list[WeightChunk]:
    """All tensors in reading order, divided into chunks of at most max_bytes bytes.

    Where the destination or the source is not contiguous, a tensor is cut between rows only, and a
    longer row is a chunk of its own.
    """
    found: list[WeightChunk] = []
    for target in in_reading_order(targets):
        source = target.source
        if not source.num_bytes:
            continue
        count = source.shape[0] if target.by_rows else math.prod(source.shape)
        each = source.num_bytes // count  # bytes of a row, or of an element
        step = max(1, max_bytes // each)
        for first in range(0, count, step):
            part = min(step, count - first)
            found.append(
                WeightChunk(target, source.offset + first * each, part * each, first, part)
            )
    return found


@torch.no_grad()
def read_in_turn(targets: Iterable[WeightTarget], progress: Callable[[int, int], None]) -> None:
    """Fill all targets, by one thread; progress(bytes done, total bytes)."""
    order = in_reading_order(targets)
    total = sum(target.source.num_bytes for target in order)
    done = 0
    for target in order:
        tensor = target.source.read()
        place = target.destination.tensor()
        place.copy_(tensor.view(place.shape))  # as many elements in the same order
        complete = target.destination.filled(target.source.num_bytes)
        if complete is not None:
            complete.convert()
        done += tensor.nbytes
        progress(done, total)


class WeightReader:
    """Starts to read weights at once; `finish` waits for the end."""

    def __init__(
        self,
        targets: Iterable[WeightTarget],
        device: torch.device,
        *,
        threads: int = THREADS,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """The parameters on `device` must have been allocated on the current stream."""
        work = weight_chunks(targets, chunk_bytes)
        self.total = sum(chunk.num_bytes for chunk in work)
        self._done = 0
        self._errors: list[BaseException] = []
        self._lock = threading.Lock()
        self._work = iter(work)
        self._stopped = False
        largest = max((chunk.num_bytes for chunk in work), default=0)
        before: torch.cuda.Event | None = None
        if device.type == "cuda":
            before = torch.cuda.Event()
            before.record()
        self._threads = [
            threading.Thread(
                target=self._run, args=(device, largest, before), name="weights", daemon=True
            )
            for _ in range(min(threads, len(work)))
        ]
        for thread in self._threads:
            thread.start()

    def finish(self, progress: Callable[[int, int], None]) -> None:
        """Wait for all weights; progress(bytes done, total bytes) meanwhile.

        Raises ModelError for a truncated or unreadable file.
        """
        try:
            while any(thread.is_alive() for thread in self._threads):
                next(thread for thread in self._threads if thread.is_alive()).join(REPORT_SECONDS)
                progress(self._done, self.total)
        finally:
            self._stopped = True
            for thread in self._threads:
                thread.join()
        if self._errors:
            raise self._errors[0]
        progress(self._done, self.total)

    def _run(self, device: torch.device, largest: int, before: torch.cuda.Event | None) -> None:
        try:
            with contextlib.closing(_Files()) as files:
                copier = _CopyStream(device, largest, before)
                for chunk in self._next_chunks():
                    copier.fill(chunk, files.descriptor(chunk.source.path))
                    with self._lock:
                        self._done += chunk.num_bytes
                copier.wait()
        except BaseException as error:
            self._errors.append(error)
            self._stopped = True

    def _next_chunks(self) -> Iterator[WeightChunk]:
        """Take chunks from the shared list until it is empty."""
        while not self._stopped:
            with self._lock:
                chunk = next(self._work, None)
            if chunk is None:
                return
            yield chunk


class _Files:
    """One thread's open files, since the kernel's read-ahead is per file descriptor."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def descriptor(self, path: Path) -> int:
        if path not in self._descriptors:
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(path, error) from None
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            self._descriptors[path] = descriptor
        return self._descriptors[path]

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)


class _CopyStream:
    """One thread's buffers and stream; on a CPU, for tests, copies are synchronous."""

    def __init__(
        self, device: torch.device, num_bytes: int, before: torch.cuda.Event | None
    ) -> None:
        self._device = device
        pinned = device.type == "cuda"
        self._buffers = [
            torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(BUFFERS)
        ]
        self._next = 0
        self._stream: torch.cuda.Stream | None = None
        self._copied: list[torch.cuda.Event] = []
        if before is not None:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_event(before)
            self._copied = [torch.cuda.Event(blocking=True) for _ in range(BUFFERS)]

    @torch.no_grad()
    def fill(self, chunk: WeightChunk, descriptor: int) -> None:
        """Read the chunk and queue its copy; convert a layer that is complete with it."""
        self._next = (self._next + 1) % BUFFERS
        buffer = self._buffers[self._next][: chunk.num_bytes]
        if self._stream is None:
            _read(chunk, descriptor, buffer)
            self._copy(chunk, buffer)
            return
        copied = self._copied[self._next]
        copied.synchronize()  # returns at once if not recorded yet
        _read(chunk, descriptor, buffer)
        with torch.cuda.stream(self._stream):
            self._copy(chunk, buffer)
            copied.record()

    def _copy(self, chunk: WeightChunk, buffer: Tensor) -> None:
        place, destination = chunk.place(), chunk.target.destination
        if isinstance(destination, StagedTensor) and self._stream is not None:
            destination.wait_allocated(self._stream)
        values = buffer.view(chunk.source.dtype).view(place.shape)
        if values.dtype != place.dtype or not place.is_contiguous():
            values = values.to(self._device, non_blocking=True)
        place.copy_(values, non_blocking=True)
        if isinstance(destination, StagedTensor) and self._stream is not None:
            event = torch.cuda.Event()
            event.record(self._stream)
            destination.layer.copied.append(event)
        complete = destination.filled(chunk.num_bytes)
        if complete is not None:
            self._convert(complete)

    def _convert(self, layer: StagedLayer) -> None:
        for event in layer.copied:
            if self._stream is not None:
                self._stream.wait_event(event)
        layer.convert()

    def wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _read(chunk: WeightChunk, descriptor: int, buffer: Tensor) -> None:
    if not chunk.source.is_contiguous:  # the file is mapped: other columns are not copied
        values = chunk.source.read_rows(chunk.first, chunk.count)
        buffer.view(values.dtype).view(values.shape).copy_(values)
        return
    view = memoryview(buffer.numpy())
    done = 0
    while done < chunk.num_bytes:
        try:
            count = os.preadv(descriptor, [view[done:]], chunk.offset + done)
        except OSError as error:
            raise _unreadable(chunk.source.path, error) from None
        if not count:
            raise ModelError(
                f"{chunk.source}: the file ends at byte {chunk.offset + done}, and the tensor at "
                f"{chunk.source.offset + chunk.source.num_bytes}: download the file again"
            )
        done += count


def _unreadable(path: Path, error: OSError) -> ModelError:
    return ModelError(f"{path}: cannot be read: {error.strerror}")
