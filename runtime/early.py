"""Early: what can begin before PyTorch is imported, which takes seconds and holds Python's lock.

All of it is done again, at once, by those who need it; if it fails here, they say so.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from runtime.compilers import Compilers

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # one of them is there where CUDA is
_begun: list[Compilers] = []


def begin(drivers: Iterable[str] = DRIVERS) -> None:
    """What a GPU needs.  Nothing if none of `drivers` is there."""
    if not any(Path(driver).exists() for driver in drivers):
        return
    work = [_open_device]
    if find_spec("triton") is not None:
        work.append(_read_triton)
        with suppress(OSError):
            _begun.append(Compilers())
    for each in work:
        threading.Thread(target=each, name="early", daemon=True).start()


def begun_compilers() -> Compilers | None:
    """The process that has been started, once.  The caller closes it."""
    return _begun.pop() if _begun else None


def _read_triton() -> None:
    """What kernels are kept by depends on all of Triton, which takes half a second to read."""
    from triton.runtime.cache import triton_key

    triton_key()


def _open_device() -> None:
    """The driver, and what it keeps for a process on the first device: PyTorch uses the same."""
    with suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        context, device = ctypes.c_void_p(), ctypes.c_int()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
