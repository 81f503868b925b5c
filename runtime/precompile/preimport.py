"""What can begin before PyTorch is imported, which takes seconds and holds the GIL.

Failures are ignored here: the code that needs a result repeats the work, and reports the error.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from model_zoo.config import ModelError
from runtime.config import ConfigError, EngineConfig
from runtime.precompile.pool import Compilers
from runtime.precompile.predict import predicted_kernels

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")  # one of them exists where CUDA does
CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR


def has_driver(drivers: Iterable[str] = DRIVERS) -> bool:
    """Whether this machine has a driver for CUDA."""
    return any(Path(driver).exists() for driver in drivers)


def begin(config: EngineConfig, drivers: Iterable[str] = DRIVERS) -> Compilers | None:
    """Start the compiler process, predictions and the CUDA context, unless there is no GPU to use.

    Returns the client of the compiler process, if there is one; the caller closes it.
    """
    if config.device == "cpu" or not has_driver(drivers):
        return None
    compilers: Compilers | None = None
    if find_spec("triton") is not None:
        with suppress(OSError):
            compilers = Compilers()
        threading.Thread(target=_read_triton, name="Triton", daemon=True).start()
    threading.Thread(target=_begin_on_device, args=(config, compilers), daemon=True).start()
    return compilers


def _read_triton() -> None:
    """Cache keys hash all of Triton's source, which takes half a second to read."""
    from triton.runtime.cache import triton_key

    triton_key()


def _begin_on_device(config: EngineConfig, compilers: Compilers | None) -> None:
    capability = _open_device()
    if compilers is not None and capability is not None:
        with suppress(ModelError, ConfigError):
            for prediction in predicted_kernels(config, capability):
                compilers.begin(prediction)


def _open_device() -> tuple[int, int] | None:
    """Create the primary context of the first device, which PyTorch then shares.

    Returns the device's compute capability; None without one.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    numbers = ctypes.c_int(), ctypes.c_int()
    for number, attribute in zip(numbers, CAPABILITY, strict=True):
        driver.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    return numbers[0].value, numbers[1].value
