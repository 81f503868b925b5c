"""The compiler process: compiles kernels for an engine, each in a fork of itself.

    python -m runtime.precompile.worker

Triton holds the GIL for a third of a kernel's compilation: separate processes compile in parallel.
Kernels go to Triton's cache, which the engine looks up first: if this process fails, only time is
lost.

Requests come on stdin, each a HEADER and a pickled CompileRequest; each is answered by a RESPONSE
on stdout when it is compiled, or has failed.  The end of stdin ends the process.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import struct
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from runtime.precompile.torch_stub import install_torch_stub

HEADER = struct.Struct("<II")  # number of the request, bytes that follow
RESPONSE = struct.Struct("<I")  # number
MAX_FORKS = 16  # kernels at once

Job = Callable[[], object]


class CompileRequest(NamedTuple):
    """compile: compiles a kernel when called; name: that kernel's.  kernels: the names of predicted
    kernels; requests for one of these wait until the prediction is compiled."""

    compile: Job
    name: str = ""
    kernels: tuple[str, ...] = ()


class ForkPool:
    """Runs jobs, each in a fork of its own, at most so many at once."""

    def __init__(self, most: int, answer: Callable[[int], None]) -> None:
        """answer: called with the number of each job that has ended, with or without success."""
        self._most, self._answer = most, answer
        self._waiting: list[tuple[int, CompileRequest]] = []
        self._running: dict[
            int, tuple[int, int]
        ] = {}  # by the read end of its pipe: pid and number
        self._predicted_kernels: dict[
            str, int
        ] = {}  # number of the prediction by kernel, until it ends

    @property
    def ends(self) -> list[int]:
        """File descriptors, one a running job, readable when the job has ended."""
        return list(self._running)

    def add(self, number: int, request: CompileRequest) -> None:
        self._predicted_kernels |= dict.fromkeys(request.kernels, number)
        self._waiting.append((number, request))
        self._start()

    def take(self, end: int) -> None:
        """Answer for the job that has ended."""
        pid, number = self._running.pop(end)
        os.close(end)
        os.waitpid(pid, 0)
        self._predicted_kernels = {
            k: made for k, made in self._predicted_kernels.items() if made != number
        }
        self._answer(number)
        self._start()

    def kill(self) -> None:
        for pid, _number in self._running.values():
            os.kill(pid, signal.SIGKILL)

    def _start(self) -> None:
        deferred: list[tuple[int, CompileRequest]] = []
        for number, request in self._waiting:
            if len(self._running) >= self._most or request.name in self._predicted_kernels:
                deferred.append((number, request))
                continue
            end, held = os.pipe()
            pid = os.fork()
            if pid == 0:
                _do(request.compile)
            os.close(held)
            self._running[end] = pid, number
        self._waiting = deferred


def _do(job: Job) -> NoReturn:
    """Run the job in a fork, and exit without Python's clean-up."""
    with contextlib.suppress(BaseException):  # the engine meets the same error and reports it
        job()
    os._exit(0)


def read(file: int, length: int) -> bytes:
    """`length` bytes, or fewer at the end of the file."""
    parts: list[bytes] = []
    while length and (part := os.read(file, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def kernel(module: str, name: str) -> Any:
    """The kernel of that name; kernels are pickled as calls of this."""
    return getattr(import_module(module), name)


def fix_cache_keys() -> None:
    """Make Triton's cache keys independent of the order in which kernels are compiled.

    A kernel's key should include the constants that its helpers use, but does not for a helper that
    is hashed for the first time: Triton reads its constants before it has collected them.
    """
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash
    if update.__module__ == __name__:
        return

    def update_hash(self: Any, func: Any) -> None:
        _ = func.cache_key  # collects them
        update(self, func)

    DependenciesFinder._update_hash = update_hash


def compile_kernel(source: Any, target: Any, options: dict[str, Any], variables: Any) -> None:
    from triton.compiler import compile

    compile(source, target=target, options=options, _env_vars=variables)


def _read_request(pickled: bytes) -> CompileRequest:
    """Unpickles here, so that the modules of a request are imported once for all forks."""
    try:
        return pickle.loads(pickled)
    except Exception:  # a name that cannot be imported: the engine compiles it
        return CompileRequest(int)


def serve(requests: int, answers: int) -> None:
    """Compile requests until the input ends."""

    def answer(number: int) -> None:
        os.write(answers, RESPONSE.pack(number))

    forks = ForkPool(min(MAX_FORKS, len(os.sched_getaffinity(0))), answer)
    try:
        while True:
            ready, _, _ = select.select([requests, *forks.ends], [], [])
            for end in ready:
                if end != requests:
                    forks.take(end)
            if requests in ready:
                header = read(requests, HEADER.size)
                if len(header) < HEADER.size:
                    return
                number, length = HEADER.unpack(header)
                forks.add(number, _read_request(read(requests, length)))
    finally:
        forks.kill()
        _end_group()


def _end_group() -> None:
    """End what forks have forked, which this process does not know: they are in its group, if the
    engine has started it."""
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # a compiler's output must not mix with responses
    install_torch_stub()  # importing PyTorch here would slow the engine's import
    from triton.runtime.cache import triton_key

    fix_cache_keys()
    triton_key()  # reads all of Triton, once for all forks
    serve(0, answers)


if __name__ == "__main__":
    main()
