"""Compiles kernels for an H100 without a GPU, and reads what the compiler made of them.

A driver that only knows the target takes the place of CUDA's: the kernels' own Python functions are
called with tensors of no device, compile as they would before a launch, and launch nothing.

    python -m tests.support.kernels.compile_for_hopper NAME ...

prints one JSON object, {NAME: [kernel, ...]}; no NAME: all of shipped_kernels.py.  With --ampere
in front of the names they are compiled for an A100.

Needs Triton for Linux on x86-64; TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.cache import get_cache_manager
from triton.runtime.driver import driver

from tests.support.machine_code.lost_bounds import lost_bounds
from tests.support.machine_code.matrix_descriptors import stray_descriptors

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
SHARED_LIMIT = 227 * 1024  # bytes of shared memory that a block may have
SM_REGISTERS, SM_SHARED, SM_THREADS = 65536, 228 * 1024, 2048
BLOCK_SHARED = 1024  # bytes that the driver keeps of each block
MULTIPLY = re.compile(r"[HI](G)?MMA|QGMMA")
INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)([^;]*);")


class CompileOnly(DriverBase):
    """Enough of a driver to compile for sm_90a or sm_80; `launched` has each launch's kernel."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self.launched: list[Any] = []
        self.utils = self

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> None:
        return None

    def get_benchmarker(self) -> None:
        return None

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_LIMIT, "multiprocessor_count": 132}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        return None, kernel, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        def launch(*args: Any) -> None:
            self.launched.append((metadata.name, metadata, args[4]))

        return launch


def describe(name: str, metadata: Any, cubin: bytes) -> dict[str, Any]:
    """What a compiled kernel needs a thread or a block, and its instructions."""
    code = _machine_code(cubin)
    threads = metadata.num_warps * 32
    resident = min(
        SM_REGISTERS // (-(-code["registers"] // 8) * 8 * threads),
        SM_SHARED // (metadata.shared + BLOCK_SHARED),
        SM_THREADS // threads,
    )
    return {
        "name": name,
        "shared": metadata.shared,
        "resident": resident,  # blocks that fit on an SM
        "lost": _lost_bounds(_source(name, metadata)),
        **code,
    }


@cache
def _machine_code(cubin: bytes) -> dict[str, Any]:
    """What the tools say of a kernel, which take half a second: many calls launch the same ones."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = _tool("cuobjdump", "-res-usage", "-sass", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found, said
    registers, stack = map(int, found.groups())
    operations, hot = instructions(said)
    return {
        "digest": hashlib.sha256(cubin).hexdigest(),
        "registers": registers,
        "stack": stack,
        "operations": operations,
        "hot": hot,
        "stray": stray_descriptors(said),
    }


@cache
def _lost_bounds(source: str) -> list[str]:
    return lost_bounds(source)


def _source(name: str, metadata: Any) -> str:
    """A kernel's IR before any pass, which Triton keeps beside the machine code."""
    path = get_cache_manager(metadata.hash).get_file(f"{name}.source")
    assert path is not None
    return Path(path).read_text()


def instructions(sass: str) -> tuple[list[str], list[str]]:
    """(all operations in order, those of the innermost loops that multiply matrices)."""
    found = [
        (int(address, 16), operation, re.search(r"0x([0-9a-f]+)\s*$", operands))
        for address, operation, operands in INSTRUCTION.findall(sass)
    ]
    loops = [
        (int(target.group(1), 16), address)
        for address, operation, target in found
        if operation.startswith("BRA") and target and int(target.group(1), 16) < address
    ]
    multiplying = {
        loop
        for loop in loops
        if any(loop[0] <= at <= loop[1] and MULTIPLY.match(operation) for at, operation, _ in found)
    }
    inner = [
        (first, last)
        for first, last in multiplying
        if not any(
            first <= other[0] and other[1] <= last and other != (first, last)
            for other in multiplying
        )
    ]
    hot = [
        operation
        for address, operation, _ in found
        if any(first <= address <= last for first, last in inner)
    ]
    return [operation for _, operation, _ in found], hot


def _tool(tool: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def compiled(
    call: Callable[[], None], capability: int = 90, every: bool = False
) -> list[dict[str, Any]]:
    """What `call` would launch, each kernel once, in the order of their first launches.

    every: each launch, where kernels of one name differ by constants
    """
    fake = CompileOnly(capability)
    driver.set_active(fake)
    call()
    if every:
        return [describe(*launch) for launch in fake.launched]
    kernels = {name: describe(name, *rest) for name, *rest in fake.launched}
    return list(kernels.values())


if __name__ == "__main__":
    from attention.common import dependent_launch
    from model_zoo.layers.moe import tiles
    from tests.support.delta_net.shipped_delta_net import DELTA_NET, HOPPER_DELTA_NET
    from tests.support.kernels.shipped_experts import EXPERTS, HOPPER_EXPERTS
    from tests.support.kernels.shipped_kernels import SHIPPED
    from tests.support.kernels.shipped_quantized import QUANTIZED

    calls = SHIPPED | QUANTIZED | EXPERTS | DELTA_NET | HOPPER_DELTA_NET
    calls |= {name: call for name, (_, call) in HOPPER_EXPERTS.items()}
    names = sys.argv[1:] or list(SHIPPED)
    capability = 80 if names[0] == "--ampere" else 90
    # On Hopper kernels are launched one before the other has ended.
    dependent_launch.can_depend = lambda device: capability >= 90
    tiles.is_hopper = lambda device: capability == 90
    names = [name for name in names if name != "--ampere"]
    found = {
        name: compiled(calls[name], capability, every=name in HOPPER_EXPERTS) for name in names
    }
    json.dump(found, sys.stdout)
