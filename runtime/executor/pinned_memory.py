"""pinned: host tensors whose pages the GPU's copy engines read and write directly."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from runtime.memory_plan import size

PAGE = 4096  # bytes, of the host's memory
log = logging.getLogger(__name__)


def pinned(shape: tuple[int, ...], dtype: torch.dtype, *, what: str) -> Tensor:
    """Uninitialized pinned memory of about this size, on a thread that has used CUDA.

    PyTorch's own allocator rounds up to a power of two: 5 GiB would be 8.  Where the memory cannot
    be pinned, a warning says so, and names it as `what`; it can be used as any other.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = _PinnedMemory(-1, -(-num_bytes // PAGE) * PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # fewer pages to pin
        memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)  # it keeps `memory`
    if code := memory.pin(tensor.data_ptr()):
        log.warning(
            "%s: %s of memory cannot be pinned (CUDA error %d), so that copies hold up steps: "
            "check the limit of locked memory (ulimit -l)", what, size(len(memory)), code,
        )  # fmt: skip
    return tensor[:num_bytes].view(dtype).view(shape)


class _PinnedMemory(mmap.mmap):
    """Memory that is unpinned before it is unmapped.

    The driver would otherwise take the next memory at these addresses for pinned.  Its functions
    return their errors, while those of the CUDA runtime also leave them to PyTorch's next launch.
    """

    _unpin: Callable[[], object] | None = None

    def pin(self, address: int) -> int:
        """Returns the driver's error, 0 if there is none."""
        driver = ctypes.CDLL("libcuda.so.1")
        start = ctypes.c_void_p(address)
        code: int = driver.cuMemHostRegister_v2(start, ctypes.c_size_t(len(self)), ctypes.c_uint(0))
        if code == 0:
            self._unpin = partial(driver.cuMemHostUnregister, start)
        return code

    def __del__(self) -> None:
        if self._unpin is not None:
            self._unpin()
