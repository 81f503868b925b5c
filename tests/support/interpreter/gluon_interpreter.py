"""Runs Gluon kernels of Hopper on the CPU, as Python over torch tensors: their indices and maths.

`interpreted(*modules)` executes the modules' source with stand-ins for Gluon.  Programs run one
after the other; partitions of a program are threads, which wait for each other at mbarriers.
Tensors have no layouts: that elements stay in their threads is checked by the compiler alone
(assert_trivial), and races of asynchronous copies show on a GPU alone.  PTX of
inline_asm_elementwise is interpreted too.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from triton.language import PropagateNan

from attention.common.hopper import tma_desc
from tests.support.interpreter.gluon_values import (
    SECONDS,
    Barrier,
    Barriers,
    Constant,
    Descriptor,
    Pointer,
    Shared,
    Stores,
    Token,
    check_barriers,
    number,
    values,
)
from tests.support.kernels.ptx import run_ptx


def _copy_to_shared(desc: Descriptor, corner: list[Any], bar: Barrier, to: Shared) -> None:
    assert to.shape == desc.block_type.shape
    first = [int(x) for x in corner]
    inside = desc.tensor[tuple(slice(x, x + n) for x, n in zip(first, to.shape, strict=True))]
    to.tensor.zero_()
    to.tensor[tuple(slice(0, size) for size in inside.shape)].copy_(inside)
    bar.copied(desc.block_type.nbytes)


def _multiply(a: Any, b: Any, acc: Any, *, use_acc: Any = True, is_async: bool = False) -> Any:
    a, b, acc = (x.tensor if isinstance(x, Shared | Token) else x for x in (a, b, acc))
    a, b, acc = (x.as_subclass(torch.Tensor) for x in (a, b, acc))
    product = a.float() @ b.float()
    total = values(product + acc) if bool(use_acc) else values(product)
    return Token(total) if is_async else total


def _wait_for_products(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    found = tuple(x.tensor if isinstance(x, Token) else x for x in deps)
    return found[0] if len(found) == 1 else found


def _specialize(partitions: Sequence[Any], warps: object, registers: object) -> None:
    errors: list[BaseException] = []

    def run(function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        try:
            function(*arguments)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if errors:
        raise errors[0]


def _inline_asm(
    asm: str, constraints: str, args: Sequence[Any], dtype: Any, is_pure: bool, pack: int
) -> Any:
    if "cvt.rn.f16x2.f32" in asm:
        y, column, first, last = args
        return torch.where((first <= column) & (column < last), y, 0.0).to(torch.float16)
    assert pack == 1
    if "rcp.approx" in asm:
        return values(torch.reciprocal(args[0]))
    if "prefetch" in asm:
        return values(torch.zeros(args[0].shape, dtype=torch.int32))
    outputs = constraints.count("=")
    assert constraints.count(",") + 1 == outputs + len(args) and outputs == len(dtype)
    plain = (torch.as_tensor(x).as_subclass(torch.Tensor) for x in args)
    words = torch.broadcast_tensors(*plain)
    found = run_ptx(asm, [word.long() for word in words], outputs)
    return tuple(values(x.to(each)) for x, each in zip(found, dtype, strict=True))


def _allocation(barriers: list[Barrier]) -> Callable[..., Any]:
    """gl.allocate_shared_memory; barriers: of the program, to which it adds."""

    def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Any:
        if layout == "barriers":
            return Barriers(shape[0], barriers)
        return Shared(torch.full(shape, 77, dtype=getattr(dtype, "dtype", dtype)))

    return allocate


def _choice(propagating: Callable[..., Any], dropping: Callable[..., Any]) -> Callable[..., Any]:
    """gl.minimum or gl.maximum, which without PropagateNan.ALL return NaN only of two."""

    def choose(a: Any, b: Any, propagate_nan: Any = PropagateNan.NONE) -> Any:
        chosen = propagating if propagate_nan == PropagateNan.ALL else dropping
        return chosen(torch.as_tensor(a), torch.as_tensor(b))

    return choose


def _language(programs: Callable[[], tuple[int, int]], barriers: list[Barrier]) -> SimpleNamespace:
    def layout(*args: object, **named: object) -> str:
        return "layout"

    named = (
        "SliceLayout",
        "BlockedLayout",
        "NVMMADistributedLayout",
        "NVMMASharedLayout",
        "SwizzledSharedLayout",
    )
    layouts = dict.fromkeys((*named, "DotOperandLayout", "DistributedLinearLayout"), layout)
    types = {
        name: getattr(torch, name)
        for name in ("int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32")
    }
    return SimpleNamespace(
        **layouts,
        **types,
        constexpr=lambda value: Constant(value) if type(value) is int else value,
        static_range=range,
        program_id=lambda axis: number(programs()[0]),
        num_programs=lambda axis: number(programs()[1]),
        arange=lambda first, last, layout: values(torch.arange(first, last, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout: values(torch.zeros(shape, dtype=dtype)),
        zeros_like=torch.zeros_like,
        where=lambda which, a, b: torch.where(torch.as_tensor(which), a, b),
        full=lambda shape, value, dtype, layout: values(
            torch.full(shape, getattr(value, "value", value), dtype=dtype)
        ),
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis),
        exp=torch.exp,
        exp2=torch.exp2,
        rsqrt=torch.rsqrt,
        minimum=_choice(torch.minimum, torch.fmin),
        maximum=_choice(torch.maximum, torch.fmax),
        cdiv=lambda a, b: (a + b - 1) // b,
        join=lambda a, b: torch.stack([a, b], -1),
        split=lambda x: x.unbind(-1),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        load=lambda p, mask=None, other=0, cache_modifier="", volatile=False: p.load(mask, other),
        store=lambda p, value, mask=None: p.store(value, mask),
        atomic_add=lambda p, much: p.update(lambda value: value + int(much)),
        atomic_max=lambda p, least: p.update(lambda value: max(value, int(least))),
        inline_asm_elementwise=_inline_asm,
        allocate_shared_memory=_allocation(barriers),
        warp_specialize=_specialize,
    )


def _modules(language: SimpleNamespace) -> dict[str, Any]:
    """Stand-ins for what kernels import, by name."""
    nothing = lambda *args, **named: None  # noqa: E731
    mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: "barriers",
        init=lambda bar, count: (setattr(bar, "count", count), setattr(bar, "pending", count)),
        expect=lambda bar, nbytes, pred=True: bar.arrive(1, nbytes),
        arrive=lambda bar, count=1, pred=True: bar.arrive(count) if pred else None,
        wait=lambda bar, phase: bar.wait(phase),
    )
    stores = Stores()
    hopper = SimpleNamespace(
        fence_async_shared=nothing,
        mbarrier=mbarrier,
        tma=SimpleNamespace(
            async_copy_global_to_shared=_copy_to_shared,
            async_copy_shared_to_global=stores.start,
            store_wait=stores.wait,
        ),
        warpgroup_mma=_multiply,
        warpgroup_mma_wait=_wait_for_products,
    )
    gluon = SimpleNamespace(jit=_jit, constexpr_function=lambda function: function)
    gluon.language = language
    return {
        "triton.experimental": SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(mma_v2=_multiply),
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.language.extra.cuda": SimpleNamespace(
            gdc_launch_dependents=nothing, gdc_wait=nothing
        ),
        "attention.common.hopper": SimpleNamespace(cta_barrier=nothing, tma_desc=tma_desc),
    }


def _jit(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda inner: inner


class Kernel:
    """Launches an interpreted kernel."""

    def __init__(
        self, function: Callable[..., None], state: list[int], barriers: list[Barrier]
    ) -> None:
        self._function, self._state, self._barriers = function, state, barriers

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **named: Any) -> None:
            for option in ("num_warps", "maxnreg", "launch_pdl"):
                named.pop(option, None)
            for program in range(grid[0]):
                self._state[:] = [program, grid[0]]
                self._barriers.clear()
                self._function(*(_argument(x) for x in args), **named)
                check_barriers(self._barriers)

        return launch


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """What lies between the first and the last element, one after the other."""
    if tensor.is_contiguous():
        return tensor
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided([last + 1], [1])


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Pointer(_memory(value))
    if hasattr(value, "block_shape"):
        return Descriptor(value)
    if isinstance(value, tuple):
        return tuple(_argument(each) for each in value)
    return number(value) if isinstance(value, int) else value


@contextmanager
def interpreted(kernel: str, *modules: str) -> Iterator[None]:
    """Inside, `kernel` of the last of the modules is interpreted; each may import those before."""
    state, barriers = [0, 1], []
    fakes = _modules(_language(lambda: (state[0], state[1]), barriers))
    before = {name: sys.modules.get(name) for name in (*fakes, *modules)}
    try:
        sys.modules.update(fakes)
        for name in modules:
            sys.modules[name] = _executed(name)
        last = sys.modules[modules[-1]]
        setattr(last, kernel, Kernel(getattr(last, kernel), state, barriers))
        for name in fakes:  # what launches the kernel needs the real ones
            _restore(name, before[name])
        yield
    finally:
        for name, module in before.items():
            _restore(name, module)


def _executed(name: str) -> ModuleType:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _restore(name: str, module: ModuleType | None) -> None:
    if module is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module
