"""Selects the back end and its kernels from a table of capabilities."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace

import torch

from attention.backend import Backend, BackendChoice, Capacity, Shape, UnsupportedAttention
from attention.kv_pool import FP8

NEVER = (99, 0)  # a compute capability that no device has


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of a machine that decide which kernels can run."""

    capability: tuple[int, int] | None  # of the CUDA device; None: a CPU
    triton: bool = True  # whether Triton is installed
    interpreted: bool = False  # TRITON_INTERPRET=1: kernels run on any device, slowly

    @classmethod
    def of(cls, device: torch.device) -> Machine:
        on_gpu = device.type == "cuda"
        return cls(
            torch.cuda.get_device_capability(device) if on_gpu else None,
            triton=importlib.util.find_spec("triton") is not None,
            interpreted=os.environ.get("TRITON_INTERPRET") == "1",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An entry of the table: a kernel, and the shapes and devices it supports."""

    name: str
    since: tuple[int, int]  # compute capability
    before: tuple[int, int] = NEVER
    fp8_since: tuple[int, int] | None = (8, 9)  # pages of float8_e4m3fn; None: never
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)
    head_dims: range = range(16, 257)
    fp8_head_dims: range | None = None  # of float8 pages; None: head_dims
    page_sizes: tuple[int, ...] = (16, 32, 64, 128)
    largest_group: int = 64
    planners: tuple[str, ...] | None = None  # whose plans it runs; None: any planner's
    interpretable: bool = True

    def unsupported_reason(self, machine: Machine, shape: Shape, planner: str) -> str:
        """Why the kernel cannot run this shape on this machine; empty if it can."""
        if self.planners is not None and planner not in self.planners:
            return f"it follows plans of {' and '.join(self.planners)}, not of {planner}"
        return self._unsupported_machine(machine, shape.kv_dtype == FP8) or self._unsupported_shape(
            shape
        )

    def _unsupported_machine(self, machine: Machine, fp8: bool) -> str:
        if not machine.triton:
            return "Triton is not installed"
        if machine.interpreted:
            return "" if self.interpretable else "the interpreter cannot run it"
        if machine.capability is None:
            return "it needs a CUDA device"
        least = self.fp8_since if fp8 and self.fp8_since else self.since
        if least <= machine.capability < self.before:
            return ""
        what = "float8 pages need" if fp8 else "it needs"
        versions = machine.capability, least, self.before
        have, need, below = (f"{major}.{minor}" for major, minor in versions)
        bound = "or more" if self.before == NEVER else f"or more and below {below}"
        return f"{what} compute capability {need} {bound}, this device has {have}"

    def _unsupported_shape(self, shape: Shape) -> str:
        stored = (shape.dtype, FP8) if self.fp8_since else (shape.dtype,)
        if shape.dtype not in self.dtypes or shape.kv_dtype not in stored:
            return f"it does not serve {shape.dtype} with pages of {shape.kv_dtype}"
        served = (shape.kv_dtype == FP8 and self.fp8_head_dims) or self.head_dims
        if shape.head_dim not in served:
            least, most = min(served), max(served)
            return f"head_dim is {shape.head_dim}, it serves {least} to {most}"
        if shape.page_size not in self.page_sizes:
            return f"pages of {shape.page_size} tokens: it serves {self.page_sizes}"
        if shape.group > self.largest_group:
            return f"{shape.group} query heads share a KV head, it serves {self.largest_group}"
        return ""


HALF_DTYPES = (torch.bfloat16, torch.float16)
# The first kernel of a list that supports a shape is taken.  Triton supports devices from 8.0 on.
FLASH1 = (Kernel(name="flash1", since=(8, 0), largest_group=1 << 20),)
DECODE = (
    Kernel(
        name="decode_hopper",
        since=(9, 0),
        before=(10, 0),
        fp8_since=(9, 0),
        dtypes=HALF_DTYPES,
        head_dims=range(24, 257, 8),  # TMA copies multiples of 16 bytes
        fp8_head_dims=range(32, 257, 16),
        largest_group=32,
        planners=("stream-k",),
        interpretable=False,
    ),
    Kernel(name="decode", since=(8, 0)),
)
PREFILL = (
    Kernel(
        name="prefill_hopper",
        since=(9, 0),
        before=(10, 0),
        fp8_since=(9, 0),
        dtypes=HALF_DTYPES,
        head_dims=range(24, 257, 8),
        fp8_head_dims=range(32, 257, 16),
        interpretable=False,
    ),
    Kernel(name="prefill", since=(8, 0)),
)
# Batch invariance was verified where one kind of MMA instruction serves all tiles.
BATCH_INVARIANT = (Kernel(name="batch-invariant", since=(8, 0), before=(10, 0)),)
TABLE = {
    "flash1": (FLASH1, FLASH1),
    "flash2": (DECODE, PREFILL),
    "batch-invariant": (BATCH_INVARIANT, BATCH_INVARIANT),
}


def dispatch(
    machine: Machine, requested: str, shape: Shape, split_planner: str = "auto"
) -> BackendChoice:
    """Resolve `--attention requested` by the table; a pure function.

    `auto` is flash2 on a GPU that can run it, else mha; its planner is stream-k.
    Raises UnsupportedAttention, naming what would work.
    """
    planner = "stream-k" if split_planner == "auto" else split_planner
    choice = _from_table(machine, requested, shape, planner)
    if choice.backend == "flash2":
        return replace(choice, planner=planner)
    if split_planner != "auto":
        raise UnsupportedAttention(
            f"--split-planner {split_planner} plans the decode kernel of flash2, and attention is "
            f"{choice.backend} here: leave it out"
        )
    return choice


def _from_table(machine: Machine, requested: str, shape: Shape, planner: str) -> BackendChoice:
    if requested == "mha" or (requested == "auto" and machine.capability is None):
        return BackendChoice("mha")
    backend = "flash2" if requested == "auto" else requested
    chosen: list[str] = []
    for kernels in TABLE[backend]:
        refusals = [kernel.unsupported_reason(machine, shape, planner) for kernel in kernels]
        if all(refusals):  # the last kernel is the most general one
            if requested == "auto":
                return BackendChoice("mha", reason=refusals[-1])
            raise UnsupportedAttention(f"--attention {requested}: {refusals[-1]}: {REMEDY}")
        chosen.append(kernels[refusals.index("")].name)
    return BackendChoice(backend, *chosen)


REMEDY = (
    "use --attention mha or auto (TRITON_INTERPRET=1 runs the kernels without a GPU, thousands of "
    "times slower, for tests)"
)


def build(
    choice: BackendChoice,
    shape: Shape,
    capacity: Capacity,
    device: torch.device,
    *,
    windows: tuple[int, ...] = (0,),
) -> Backend:
    """Build the chosen back end and allocate its workspace.

    windows  sliding windows of the model's layers, 0 for layers with full attention
    Raises UnsupportedAttention for an unknown split planner.
    """
    if choice.backend == "mha":
        from attention.reference import ReferenceBackend

        return ReferenceBackend(choice.reason)
    from attention.triton_backend import Flash1Backend, TritonBackend

    if choice.backend == "flash1":
        return Flash1Backend()
    if choice.backend == "batch-invariant":
        from attention.batch_invariant.backend import BatchInvariantBackend

        return BatchInvariantBackend(shape, capacity, device, windows=windows)
    return TritonBackend(choice, shape, capacity, device, windows=windows)


def choose(
    device: torch.device,
    requested: str,
    shape: Shape,
    capacity: Capacity,
    *,
    split_planner: str = "auto",
    windows: tuple[int, ...] = (0,),
) -> Backend:
    """The back end for `--attention requested` on this device: `dispatch`, then `build`.

    split_planner  of split-KV decode: fa3, greedy or stream-k; auto is stream-k
    Raises UnsupportedAttention, naming what would work, if the device cannot run it.
    """
    choice = dispatch(Machine.of(device), requested, shape, split_planner)
    return build(choice, shape, capacity, device, windows=windows)
