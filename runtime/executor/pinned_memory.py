"""pinned: host tensors whose pages the GPU's copy engines read and write directly."""

from __future__ import annotations

import ctypes
import logging
import math
import mmap

import torch
from torch import Tensor

from runtime.memory_plan import size

PAGE = 4096  # bytes, of the host's memory
log = logging.getLogger(__name__)


def pinned(shape: tuple[int, ...], dtype: torch.dtype, *, what: str) -> Tensor:
    """Uninitialized pinned memory of about this size, for a process with a CUDA context.

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

    _address = 0  # where it is pinned

    def pin(self, address: int) -> int:
        """Returns the driver's error, 0 if there is none."""
        register = ctypes.CDLL("libcuda.so.1").cuMemHostRegister_v2
        register.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        code: int = register(address, len(self), 0)
        if code == 0:
            self._address = address
        return code

    def __del__(self) -> None:
        if self._address:
            ctypes.CDLL("libcuda.so.1").cuMemHostUnregister(ctypes.c_void_p(self._address))
