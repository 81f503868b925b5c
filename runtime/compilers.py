"""Compilers: the engine's end of the compiler process (compiler_process.py)."""

from __future__ import annotations

import io
import itertools
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from runtime.compiler_process import ANSWER, HEADER, kernel, read

COMMAND = (sys.executable, "-P", "-m", "runtime.compiler_process")
MOST_SECONDS = 60.0  # for a kernel; after that the engine compiles it, and all others
END_SECONDS = 1.0


class Compilers:
    """Has kernels compiled.  If that fails, nobody is told: the engine compiles what is missing."""

    def __init__(self, *command: str) -> None:
        """Raises OSError if there can be no such process."""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command or COMMAND, stdin=pipe, stdout=pipe, bufsize=0, start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._numbers = itertools.count()
        self._asked: dict[int, threading.Event] = {}
        self._sending = threading.Lock()
        self._of_use = True
        threading.Thread(target=self._listen, name="compilers", daemon=True).start()

    def compile(self, compile_kernel: Callable[[], Any]) -> None:
        """Return when a kernel is where Triton keeps it, or will not be.  For many threads.

        compile_kernel: what Triton gives to an executor to do it
        """
        request = _request(compile_kernel)
        if request is None or not self._of_use:
            return
        number, answered = next(self._numbers), threading.Event()
        self._asked[number] = answered
        try:
            with self._sending:
                _send(self._requests, HEADER.pack(number, len(request)) + request)
        except OSError:
            self._of_use = False
        if self._of_use and not answered.wait(MOST_SECONDS):
            self._of_use = False

    def _listen(self) -> None:
        while len(answer := read(self._answers, ANSWER.size)) == ANSWER.size:
            self._asked[ANSWER.unpack(answer)[0]].set()
        self._of_use = False
        for answered in list(self._asked.values()):
            answered.set()

    def close(self) -> None:
        """End the process, and what it is compiling."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _send(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _request(compile_kernel: Callable[[], Any]) -> bytes | None:
    """What `compile_kernel` would compile; None if only this process can, or need not."""
    names, cells = compile_kernel.__code__.co_freevars, compile_kernel.__closure__ or ()
    found = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
    try:
        source, target, options = found["src"], found["target"], found["options"]
        variables = found["env_vars"]
        if _is_kept(source, target, options, variables):
            return None
        file = io.BytesIO()
        _Pickler(file).dump((source, target, options.__dict__, variables))
    except (KeyError, AttributeError, TypeError, pickle.PicklingError):
        return None
    return file.getvalue()


def _is_kept(source: Any, target: Any, options: Any, variables: dict[str, str]) -> bool:
    """Whether Triton has compiled it in an earlier start."""
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
            raise pickle.PicklingError(f"{module}.{name} is not there for another process")
        return kernel, (module, name)
