"""The device of this process: its kind, data types, threads and free memory."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

import torch

from model_zoo.config import ModelConfig
from model_zoo.layers.error_text import first_line
from runtime.config import (
    ConfigError,
    DeviceOption,
    DType,
    DTypeName,
    KVDType,
    KVDTypeName,
    StateDType,
    dtype_for,
)
from runtime.host_memory import CGROUP, free_host_bytes
from runtime.precompile.preimport import has_driver

DTYPES: dict[DTypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KV_DTYPES: dict[KVDTypeName, torch.dtype] = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn}
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
HIDES_ALL = re.compile(r"(-.*|NoDevFiles|none|void)?")  # values with which a CPU is meant
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
OUT_OF_MEMORY = ("out of memory", "ALLOC_FAILED", "can't allocate memory")
KEPT_BYTES = 1 << 30
MALLOPT_TRIM_THRESHOLD, MALLOPT_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


class UnusableGPU(ConfigError):
    """A GPU is visible and gives no context: it is busy, for one process alone, or broken."""


def choose_device(requested: DeviceOption) -> torch.device:
    """The device for `--device requested`.

    Raises ConfigError if there is none of that kind, or none of those that the environment names.
    """
    if requested == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if requested == "cuda":
        raise ConfigError(
            "--device cuda: PyTorch sees no CUDA device (is the driver installed, and is this a "
            "CUDA build of torch?): use --device cpu or auto"
        )
    named = os.environ.get(VISIBLE_DEVICES, "")
    if not HIDES_ALL.fullmatch(named.strip()) and torch.version.cuda and has_driver():
        raise ConfigError(
            f"{VISIBLE_DEVICES}={named}: PyTorch sees no such GPU: {_remedy()}, or use --device cpu"
        )
    return torch.device("cpu")


def _remedy() -> str:
    """What to do about GPUs that PyTorch does not see, by what the driver says of them."""
    code, count = ask_driver()
    if code not in (0, NO_DEVICE):
        return f"the driver does not start (cuInit: error {code}); see whether nvidia-smi runs"
    if count:
        return (
            f"the driver sees {count}, and may be too old for this build of torch (CUDA "
            f"{torch.version.cuda}): install a newer driver"
        )
    return (
        "name one of this machine (nvidia-smi lists them; each engine of --data-parallel has the "
        "next one)"
    )


def ask_driver() -> tuple[int, int]:
    """-> (the result of cuInit, 0 if all is well; how many GPUs it sees, 0 if it does not say)."""
    try:
        driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    except OSError:
        return NO_DEVICE, 0
    code = driver.cuInit(0)
    if code == 0:
        driver.cuDeviceGetCount(ctypes.byref(count))
    return code, count.value


def choose_dtype(requested: DType, config: ModelConfig, device: torch.device) -> DTypeName:
    """dtype_for a model on this machine's device.

    A CPU without bfloat16 instructions emulates them several times slower than it does float32.
    """
    cuda = device.type == "cuda"
    return dtype_for(
        requested,
        config.dtype,
        "cuda" if cuda else "cpu",
        has_bfloat16=(
            torch.cuda.is_bf16_supported(including_emulation=False) if cuda else _cpu_has_bfloat16()
        ),
        fits_float16=config.fits_float16,
    )


def choose_kv_dtype(requested: KVDType, dtype: DTypeName) -> KVDTypeName:
    """The data type of the KV pages for `--kv-dtype requested`; auto is that of the weights."""
    return dtype if requested == "auto" else requested


def choose_state_dtype(requested: StateDType) -> torch.dtype:
    """The data type of recurrent states for `--state-dtype requested`."""
    return torch.float32 if requested == "auto" else DTYPES[requested]


def _cpu_has_bfloat16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return re.search(r"^flags\s*:.*\b(avx512_bf16|amx_bf16)\b", flags, re.MULTILINE) is not None


def choose_threads(requested: int, processes: int = 1) -> int:
    """Compute threads: all physical cores that this process may use but one, shared by processes.

    One is left to the API process: two compute threads of which one shares its core wait for each
    other at every operation, which is far slower than one thread alone.
    """
    return requested or max(1, (physical_cores() - 1) // processes)


def physical_cores() -> int:
    """Cores in this process's affinity mask and CPU quota; hyper-threads count once."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if usable is None:
        return os.cpu_count() or 1
    cores: set[tuple[str, str]] = set()
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        try:
            package = (topology / "physical_package_id").read_text()
            cores.add((package, (topology / "core_id").read_text()))
        except OSError:
            cores.add(("unknown", str(cpu)))
    return max(1, min(len(cores), int(_cpu_quota())))


def _cpu_quota() -> float:
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return 1e9 if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return 1e9


def keep_freed_memory() -> None:
    """Let glibc's allocator keep the memory that a step on a CPU frees for the next one.

    Otherwise it may return the largest tensors to the system every time, which then clears their
    pages: of a step of 48 rows of 150,000 logits that was 12 % of the CPU time.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
        if mallopt is not None:
            mallopt(MALLOPT_TRIM_THRESHOLD, KEPT_BYTES)
            mallopt(MALLOPT_MMAP_THRESHOLD, KEPT_BYTES)


def free_bytes(device: torch.device) -> int:
    """Memory that could be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes(CGROUP)


def gpu_free_bytes(index: int) -> int:
    """Raises UnusableGPU, where another process has the GPU or its memory."""
    try:
        return free_bytes(torch.device("cuda", index))
    except RuntimeError as error:
        raise UnusableGPU(f"GPU {index} cannot be used: {first_line(error)}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator, a library or the driver ran out of memory.

    Except for PyTorch's GPU allocator, only the message tells; libraries and the driver raise it
    when they load a kernel or allocate a workspace.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and any(word in words for word in OUT_OF_MEMORY)
