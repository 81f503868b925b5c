"""Precompilation: a step run under `compiling_only` compiles all kernels that it would launch.

A kernel takes 0.1 to 5 seconds to compile, and a step would compile one after the other.  Here the
step continues at once, while threads wait for the compiler process (pool.py), or compile themselves
if there is none; then they contend for the GIL, which Triton holds for a third of the time.  The
threads also do the work of a kernel's first launch: they load it, and in Triton 3.6 a C compiler
builds its launcher, which takes a third of a second.
Kernels are stored in Triton's cache: TRITON_CACHE_DIR, or ~/.triton/cache.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runtime.config import ConfigError
from runtime.precompile.pool import Compilers
from runtime.precompile.worker import fix_cache_keys

MAX_THREADS = 16
MAX_WAITING = 64  # threads that wait for the compiler process
# Until the step has run, threads that take the GIL would only slow it down.
RUN_SECONDS = 2.0
# The GIL's switch interval: with Python's 5 ms, a kernel that takes the GIL twenty times would wait
# for seconds.
SWITCH_SECONDS = 0.0005
Optional = Callable[[], AbstractContextManager[None]]


def check_cache() -> None:
    """Raises ConfigError if Triton's cache directory is not writable."""
    from triton import knobs

    folder = Path(knobs.cache.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"compiled kernels are kept in {folder}: {error.strerror}: set TRITON_CACHE_DIR to a "
            "folder that this user may write to"
        ) from None


@contextmanager
def compiling_only(compilers: Compilers | None = None, *, threads: int = 0) -> Iterator[Optional]:
    """Kernels launched inside are compiled, and not run.

    compilers: compiles them, and is closed on exit; else `threads` threads do, 0: one a core

    Their outputs stay uninitialized: code inside may compute with them, but neither read them on
    the host nor index with them.  Exit waits for all kernels and raises compilation errors, but
    those of kernels that were launched inside of the yielded context manager alone: they are
    raised when the kernel is launched.
    """
    from triton.runtime._async_compile import active_mode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **options)
        mode.launched(kernel)
        return kernel

    count = threads or min(MAX_THREADS, len(os.sched_getaffinity(0)))
    fix_cache_keys()
    interval = sys.getswitchinterval()
    try:
        with (
            _launchers_by_threads(),
            closing(compilers) if compilers is not None else nullcontext(),
            _Pool(count, compilers) as pool,
            _compile_mode(pool) as mode,
        ):
            JITFunction.run = compile_only
            try:
                yield mode.optional
            finally:
                JITFunction.run = launch
                sys.setswitchinterval(SWITCH_SECONDS)
                pool.begin.set()
    finally:
        sys.setswitchinterval(interval)
        active_mode.set(None)  # a kernel that does not compile leaves the mode active


def _compile_mode(pool: ThreadPoolExecutor) -> Any:
    """Triton's asynchronous mode, which keeps errors of optional kernels to itself."""
    from triton import AsyncCompileMode

    class Mode(AsyncCompileMode):
        def __init__(self) -> None:
            super().__init__(pool)
            self._needed, self._is_optional = set[int](), False

        @contextmanager
        def optional(self) -> Iterator[None]:
            self._is_optional = True
            try:
                yield
            finally:
                self._is_optional = False

        def launched(self, kernel: Any) -> None:
            """A kernel that was optional first is needed as soon as another launch is not."""
            if not self._is_optional:
                self._needed.add(id(kernel))

        def __exit__(self, *raised: Any) -> None:
            others = [one for one in self.future_kernels.values() if id(one) not in self._needed]
            for kernel in others:
                kernel.result(ignore_errors=True)
            ended = {kernel.future for kernel in others}
            self.raw_futures = [future for future in self.raw_futures if future not in ended]
            super().__exit__(*raised)

    return Mode()


@contextmanager
def _launchers_by_threads() -> Iterator[None]:
    """Let threads build and load launchers concurrently, which is not safe in Triton 3.6.

    All launchers are extension modules of the same name.  Python reuses the module object that this
    name has at the moment and replaces its contents: between two threads, a kernel may get the
    launcher of another.  Here one is loaded at a time, and its contents are copied.

    Many kernels have the same launcher: one thread compiles it while others that need it wait, and
    then find it in Triton's cache.
    """
    from triton.backends.nvidia import driver
    from triton.runtime import build

    load, lock = build._load_module_from_path, threading.Lock()
    compile_launcher, locks = driver.compile_module_from_src, dict[str, threading.Lock]()

    def load_isolated(name: str, path: str) -> SimpleNamespace:
        with lock:
            return SimpleNamespace(**vars(load(name, path)))

    def compile_once(src: str, *args: Any, **options: Any) -> Any:
        with locks.setdefault(src, threading.Lock()):
            return compile_launcher(src, *args, **options)

    build._load_module_from_path = load_isolated
    driver.compile_module_from_src = compile_once
    try:
        yield
    finally:
        build._load_module_from_path = load
        driver.compile_module_from_src = compile_launcher


class _Pool(ThreadPoolExecutor):
    """Has kernels compiled, and from `begin` on makes them ready to be launched."""

    def __init__(self, threads: int, compilers: Compilers | None) -> None:
        waiting = threads if compilers is None else MAX_WAITING
        super().__init__(waiting, "compile", _stay_on_device())
        self._compilers = compilers
        self._compiling = threading.Semaphore(threads)
        self.begin = threading.Event()

    def submit(self, fn: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._make_ready, fn)

    def _make_ready(self, compile_kernel: Callable[[], Any]) -> Any:
        from triton.runtime.errors import OutOfResources

        if self._compilers is not None:
            self._compilers.compile(compile_kernel)
        self.begin.wait(RUN_SECONDS)
        with self._compiling:
            kernel = compile_kernel()
        # A property that loads the kernel on first access.  If the device has too few resources,
        # the launch raises again, to a caller that may have a fallback.
        with suppress(OutOfResources):
            _ = kernel.run
        return kernel


def _stay_on_device() -> Callable[[], None] | None:
    """An initializer that gives threads the current device of this one."""
    import torch

    if not torch.cuda.is_initialized():
        return None
    return partial(torch.cuda.set_device, torch.cuda.current_device())
