"""The compiler process: compiles kernels for an engine, each in a fork of itself.

    python -m runtime.precompile.worker

Triton holds Python's lock for a third of the time that a kernel takes to compile: processes do it
at the same time.  What they compile is where Triton keeps it, and the engine looks there first: if
this process fails, or dies, only time is lost.

Requests come on stdin, each a HEADER and a pickled Wanted; for each goes an ANSWER to stdout when
it is compiled, or cannot be.  The end of stdin ends all.
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
ANSWER = struct.Struct("<I")  # number
MAX_FORKS = 16  # kernels at once

Job = Callable[[], object]


class CompileRequest(NamedTuple):
    """compile: what compiles something when it is called.  kernels: the names of what it compiles,
    if it is a forecast; others that want the same wait until then, and find it."""

    compile: Job
    name: str = ""
    kernels: tuple[str, ...] = ()


class ForkPool:
    """Jobs, each in a process of its own, and so many at once."""

    def __init__(self, most: int, answer: Callable[[int], None]) -> None:
        """answer: called with the number of a job that has ended, however it did."""
        self._most, self._answer = most, answer
        self._waiting: list[tuple[int, CompileRequest]] = []
        self._running: dict[int, tuple[int, int]] = {}  # by what ends with it: pid and number
        self._predicted_kernels: dict[str, int] = {}  # by kernel, those that have not ended

    @property
    def ends(self) -> list[int]:
        """Files, one a running job, which can be read when the job has ended."""
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
    """The fork's life.  It leaves all that Python does in the end to its parent."""
    with contextlib.suppress(BaseException):  # the engine meets it, too, and says what is wrong
        job()
    os._exit(0)


def read(file: int, length: int) -> bytes:
    """So many bytes, or fewer where the file ends."""
    parts: list[bytes] = []
    while length and (part := os.read(file, length)):
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def kernel(module: str, name: str) -> Any:
    """The kernel of that name; what is pickled of it."""
    return getattr(import_module(module), name)


def fix_cache_keys() -> None:
    """Have Triton keep a kernel where it looks for it, in whatever order kernels are met.

    What a kernel is kept by should include the constants that its helpers use, but does not where
    a helper is met for the first time: Triton takes its constants before it has looked for them.
    """
    from triton.runtime.jit import DependenciesFinder

    update = DependenciesFinder._update_hash
    if update.__module__ == __name__:
        return

    def update_hash(self: Any, func: Any) -> None:
        _ = func.cache_key  # finds them
        update(self, func)

    DependenciesFinder._update_hash = update_hash


def compile_kernel(source: Any, target: Any, options: dict[str, Any], variables: Any) -> None:
    from triton.compiler import compile

    compile(source, target=target, options=options, _env_vars=variables)


def _read_request(pickled: bytes) -> CompileRequest:
    """The modules that it needs are imported here, and in no fork again."""
    try:
        return pickle.loads(pickled)
    except Exception:  # it names what is not here: the engine compiles it
        return CompileRequest(int)


def serve(requests: int, answers: int) -> None:
    """Until the requests end."""

    def answer(number: int) -> None:
        os.write(answers, ANSWER.pack(number))

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


def main() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a compiler prints is no answer
    install_torch_stub()  # two processes that import it at the same time hold each other up
    from triton.runtime.cache import triton_key

    fix_cache_keys()
    triton_key()  # reads all of Triton, once for all forks
    serve(0, answers)


if __name__ == "__main__":
    main()
