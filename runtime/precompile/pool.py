"""Compilers: the engine's client of the compiler process (worker.py)."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from runtime.precompile.predict import PredictedKernels
from runtime.precompile.worker import HEADER, RESPONSE, CompileRequest, compile_kernel, kernel, read

COMMAND = (sys.executable, "-P", "-m", "runtime.precompile.worker")
MAX_SECONDS = 60.0  # for a kernel; then the engine compiles it, and all others, itself
END_SECONDS = 1.0


class Compilers:
    """Has kernels compiled.  Failures are silent: the engine compiles what is missing."""

    def __init__(self, *command: str) -> None:
        """Starts the process.  Raises OSError if that fails."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command or COMMAND, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._numbers = itertools.count()
        self._pending: dict[int, threading.Event] = {}
        self._sending = threading.Lock()
        self._usable = True
        threading.Thread(target=self._listen, name="compilers", daemon=True).start()

    def compile(self, make: Callable[[], Any]) -> None:
        """Block until a kernel is in Triton's cache, or has failed to compile.  Thread-safe.

        make: the callable that Triton submits to an executor to compile it
        """
        request = _request(make)
        if request is None or not self._usable:
            return
        answered = self._send(request)
        if self._usable and not answered.wait(MAX_SECONDS):
            self._kill()

    def begin(self, prediction: PredictedKernels) -> None:
        """Queue the compilation of predicted kernels."""
        self._send(pickle.dumps(CompileRequest(prediction.compile, kernels=prediction.kernels)))

    def _send(self, request: bytes) -> threading.Event:
        number, answered = next(self._numbers), threading.Event()
        self._pending[number] = answered
        try:
            with self._sending:
                data = HEADER.pack(number, len(request)) + request
                while data and self._usable:  # once closed, the descriptor may be reused
                    data = data[os.write(self._requests, data) :]
        except OSError:
            self._usable = False
        return answered

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout:
            while len(answer := read(self._answers, RESPONSE.size)) == RESPONSE.size:
                self._pending[RESPONSE.unpack(answer)[0]].set()
        self._usable = False
        for answered in list(self._pending.values()):
            answered.set()

    def close(self) -> None:
        """End the process and all compilations."""
        assert self._process.stdin is not None
        self._usable = False
        if self._sending.acquire(timeout=END_SECONDS):  # else it does not read, and is killed below
            self._process.stdin.close()
            self._sending.release()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()

    def _kill(self) -> None:
        """Kill it and its forks, which unblocks threads that wait for a response or a full pipe."""
        self._usable = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _request(make: Callable[[], Any]) -> bytes | None:
    """The pickled request for what `make` compiles; None if it is cached or not picklable."""
    names, cells = make.__code__.co_freevars, make.__closure__ or ()
    found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    try:
        source, target, options = found["src"], found["target"], found["options"]
        variables = found["env_vars"]
        if _is_kept(source, target, options, variables):
            return None
        file = io.BytesIO()
        job = partial(compile_kernel, source, target, options.__dict__, variables)
        _Pickler(file).dump(CompileRequest(job, source.name))
    except (KeyError, AttributeError, TypeError, pickle.PicklingError):
        return None
    return file.getvalue()


def _is_kept(source: Any, target: Any, options: Any, variables: dict[str, str]) -> bool:
    """Whether the kernel is in Triton's cache."""
    from hashlib import sha256

    from triton.compiler.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    key = get_cache_key(source, make_backend(target), options, variables)
    manager = get_cache_manager(sha256(key.encode()).hexdigest())
    return bool(manager.get_group(f"{source.name[:150]}.json"))


class _Pickler(pickle.Pickler):
    """Kernels are pickled by name."""

    def reducer_override(self, obj: Any) -> Any:
        from triton.runtime.jit import JITCallable

        if not isinstance(obj, JITCallable):
            return NotImplemented
        module, name = obj.__module__, obj.__name__
        if module == "__main__" or getattr(sys.modules[module], name, None) is not obj:
            raise pickle.PicklingError(f"{module}.{name} cannot be imported by another process")
        return kernel, (module, name)
