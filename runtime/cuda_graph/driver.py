"""Driver: the copies and events of a step, asked of CUDA's driver without PyTorch in between.

While a GPU works on a step the host sleeps, and then has little of what it needs in its caches: the
way through PyTorch to two copies, two events and a graph took 180 us of CPU there, and these calls
take 82 (H100).
"""

from __future__ import annotations

import ctypes

import torch

NOT_READY = 600
SIGNATURES = {
    "cuMemcpyHtoDAsync_v2": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemcpyDtoHAsync_v2": (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p),
    "cuEventRecord": (ctypes.c_void_p, ctypes.c_void_p),
    "cuEventQuery": (ctypes.c_void_p,),
}


class CudaStream:
    """The stream that is current when this is made.  One thread uses it, the one that made it.

    Addresses are those of tensors, which the caller keeps alive; host memory is pinned.  All calls
    return before the device is done and raise RuntimeError if the driver refuses.
    """

    def __init__(self, device: torch.device) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        for name, arguments in SIGNATURES.items():
            getattr(library, name).argtypes = arguments
        self._to_device = library.cuMemcpyHtoDAsync_v2
        self._to_host = library.cuMemcpyDtoHAsync_v2
        self._record = library.cuEventRecord
        self._query = library.cuEventQuery
        self._stream: int = torch.cuda.current_stream(device).cuda_stream

    def to_device(self, target: int, source: int, num_bytes: int) -> None:
        _check("copy to the device", self._to_device(target, source, num_bytes, self._stream))

    def to_host(self, target: int, source: int, num_bytes: int) -> None:
        _check("copy to the host", self._to_host(target, source, num_bytes, self._stream))

    def record(self, event: int) -> None:
        _check("record an event", self._record(event, self._stream))

    def has_happened(self, event: int) -> bool:
        code: int = self._query(event)
        if code != NOT_READY:
            _check("ask for an event", code)
        return code != NOT_READY


class CudaEvent:
    """A place in a queue that can be waited for, without keeping a CPU busy."""

    def __init__(self, queue: CudaStream) -> None:
        self._queue = queue
        self._event = torch.cuda.Event(blocking=True)
        self._event.record()  # makes it
        self._handle: int = self._event.cuda_event

    def set(self) -> None:
        """Behind all that is queued now."""
        self._queue.record(self._handle)

    def wait(self) -> None:
        """Until the device has come there."""
        # To wait for what has happened takes longer than to ask.
        if not self._queue.has_happened(self._handle):
            self._event.synchronize()


def _check(what: str, code: int) -> None:
    if code:
        raise RuntimeError(f"CUDA's driver could not {what}: error {code}")
