"""Fake tensors, with which the compiler process launches kernels that are compiled and not run.

A FakeTensor has the shape, dtype and strides of a contiguous tensor, and no numbers.  The process
does not import PyTorch (torch_stub.py), whose constructors are replaced.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

PROCESSORS = 132  # of an H100 or H200: their number decides which GEMMs are tried
BYTES = {
    "float32": 4, "int32": 4, "int64": 8, "bfloat16": 2, "float16": 2, "int8": 1, "uint8": 1,
    "float8_e4m3fn": 1,
}  # fmt: skip


class FakeDevice:
    type = "cuda"


GPU = FakeDevice()


def bytes_of(dtype: Any) -> int:
    """dtype: of the stub, or its name"""
    return BYTES[str(dtype).removeprefix("torch.")]


class FakeTensor:
    """What launches read of a tensor."""

    device = GPU

    def __init__(self, *shape: int, dtype: Any) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> FakeTensor:
        return FakeTensor(len(range(*rows.indices(len(self)))), *self.shape[1:], dtype=self.dtype)

    def stride(self, dim: int | None = None) -> Any:
        strides = tuple(math.prod(self.shape[after + 1 :]) for after in range(self.ndim))
        return strides if dim is None else strides[dim]

    def element_size(self) -> int:
        return bytes_of(self.dtype)

    @property
    def itemsize(self) -> int:
        return self.element_size()

    def data_ptr(self) -> int:
        return 256

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: math.prod(self.shape) * self.element_size())

    def is_contiguous(self) -> bool:
        return True

    def contiguous(self) -> FakeTensor:
        return self

    def as_strided(self, shape: tuple[int, ...], strides: object) -> FakeTensor:
        return FakeTensor(*shape, dtype=self.dtype)

    def view(self, dtype: Any) -> FakeTensor:
        *others, columns = self.shape
        columns = columns * self.element_size() // bytes_of(dtype)
        return FakeTensor(*others, columns, dtype=dtype)

    def new_empty(self, *shape: int) -> FakeTensor:
        return FakeTensor(*shape, dtype=self.dtype)


def fake_tensor(*shape: Any, dtype: Any = "float32", device: object = None) -> FakeTensor:
    """As torch.empty."""
    return FakeTensor(*(shape[0] if isinstance(shape[0], tuple) else shape), dtype=dtype)


def compile_only() -> None:
    """Make kernel launches in this process compile for Hopper and launch nothing."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    from attention.common import dependent_launch

    torch.empty = torch.zeros = fake_tensor  # type: ignore[assignment]  # PyTorch is not imported
    properties: Any = SimpleNamespace(multi_processor_count=PROCESSORS)
    torch.cuda.get_device_properties = lambda device=None: properties
    dependent_launch.can_depend = lambda device: True  # type: ignore[assignment]
    nowhere: Any = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(nowhere)
    run: Any = JITFunction.run

    def compile_kernel(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    JITFunction.run = compile_kernel
