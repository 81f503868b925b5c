"""What interpreted Gluon kernels compute with, for gluon_interpreter.py: tensors, pointers, shared
memory, mbarriers, TMA descriptors and stores."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

SECONDS = 60.0  # that a partition may wait for another


class Values(torch.Tensor):
    """A tensor of a kernel."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch.Tensor's, in a third of the time: it looks for no other classes."""
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if type(result) is torch.Tensor:
            return result.as_subclass(cls)
        if type(result) in (tuple, list):
            return type(result)(
                x.as_subclass(cls) if type(x) is torch.Tensor else x for x in result
            )
        return result

    @property
    def type(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> Any:  # pyright: ignore
        dtype = getattr(dtype, "dtype", dtype)
        if not bitcast:
            return super().to(dtype)
        return self.contiguous().view(dtype)


def values(tensor: torch.Tensor) -> Values:
    return tensor.as_subclass(Values)


def number(value: int) -> Values:
    """A scalar of a kernel."""
    return values(torch.tensor(value))


class Element:
    """The type that a pointer is to."""

    def __init__(self, memory: torch.Tensor) -> None:
        self.dtype, self.primitive_bitwidth = memory.dtype, 8 * memory.element_size()

    def __eq__(self, other: object) -> bool:
        return self.dtype == getattr(other, "dtype", other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Pointer:
    def __init__(self, memory: torch.Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=Element(memory))

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def to(self, dtype: torch.dtype) -> Any:
        self._check(torch.as_tensor(self.at))
        return self.at

    def _check(self, at: torch.Tensor) -> torch.Tensor:
        assert ((at >= 0) & (at < self.memory.numel())).all(), "an address beyond the tensor"
        return at.long()

    def load(self, mask: Any, other: Any) -> Values:
        at = torch.as_tensor(self.at)
        if mask is None:
            return values(self.memory.flatten()[self._check(at)].clone())
        at, mask = torch.broadcast_tensors(at, mask)
        found = torch.full(at.shape, other, dtype=self.memory.dtype)
        found[mask] = self.memory.flatten()[self._check(at[mask])]
        return values(found)

    def store(self, stored: Any, mask: Any) -> None:
        at = torch.as_tensor(self.at)
        mask = torch.ones_like(at, dtype=torch.bool) if mask is None else mask
        at, mask, stored = torch.broadcast_tensors(at, mask, torch.as_tensor(stored))
        self.memory.view(-1)[self._check(at[mask])] = stored[mask].to(self.memory.dtype)

    def update(self, change: Callable[[int], int]) -> Values:
        """-> the value before, as of atomic operations."""
        at = int(self.at)
        before = int(self.memory.view(-1)[at])
        self.memory.view(-1)[at] = change(before)
        return number(before)


class Shared:
    """Shared memory; views of it share its values."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.shape, self.dtype = tensor, list(tensor.shape), tensor.dtype
        self.layout = None

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < self.shape[0]
        return Shared(self.tensor[int(i)])

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.tensor.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.tensor.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.tensor.view(*shape))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: object) -> Shared:
        """Of another height, by layouts that are one row after the other."""
        assert dtype == self.dtype and shape[-1] == self.shape[-1]
        return self.reshape(shape)

    def load(self, layout: object) -> Values:
        return values(self.tensor.clone())

    def store(self, stored: torch.Tensor) -> None:
        self.tensor.copy_(stored)


class Barrier:
    """An mbarrier."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0
        self.changed = threading.Condition()

    def arrive(self, count: int, more_bytes: int = 0) -> None:
        with self.changed:
            self.pending -= count
            self.bytes += more_bytes
            self._complete()

    def copied(self, nbytes: int) -> None:
        with self.changed:
            self.bytes -= nbytes
            self._complete()

    def _complete(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase % 2 != int(parity), SECONDS)
        assert done, "a barrier is waited for in vain"


class Barriers:
    def __init__(self, number: int, allocated: list[Barrier]) -> None:
        self.all = [Barrier() for _ in range(number)]
        allocated += self.all

    def index(self, i: Any) -> Barrier:
        assert 0 <= int(i) < len(self.all)
        return self.all[int(i)]


def check_barriers(barriers: Sequence[Barrier]) -> None:
    """That a program leaves no phase half done: each has had the arrivals and bytes it counts."""
    for i, bar in enumerate(barriers):
        late = f"{bar.count - bar.pending} of {bar.count} arrivals, {bar.bytes} bytes to come"
        assert bar.pending == bar.count and bar.bytes == 0, f"barrier {i} is left with {late}"


class Descriptor:
    """A TMA descriptor."""

    def __init__(self, real: Any) -> None:
        self.tensor, self.dtype = real.base, real.base.dtype
        box = list(real.block_shape)
        nbytes = math.prod(box) * real.base.element_size()
        self.block_type = SimpleNamespace(shape=box, nbytes=nbytes)


class Constant(int):
    """A constant of a module, which kernels and what launches them read."""

    @property
    def value(self) -> int:
        return int(self)


class Stores:
    """Copies from shared to global memory that each thread has yet to wait for."""

    def __init__(self) -> None:
        self._threads = threading.local()

    def start(self, desc: Descriptor, corner: list[Any], of: Shared) -> None:
        assert of.shape == desc.block_type.shape
        first = [int(x) for x in corner]
        at = tuple(slice(x, x + n) for x, n in zip(first, of.shape, strict=True))
        self._threads.__dict__.setdefault("pending", []).append((desc.tensor[at], of.tensor))

    def wait(self, pendings: int) -> None:
        pending = self._threads.__dict__.setdefault("pending", [])
        for to, tensor in pending[: len(pending) - pendings]:
            to.copy_(tensor[tuple(slice(0, size) for size in to.shape)])
        del pending[: len(pending) - pendings]


class Token:
    """Products that have not been waited for."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
