"""ImageDecoder: sends images to the processes of decode_worker.py, which may hang or die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from server.generation.admission import full
from server.images.decode_worker import CPU_SECONDS, DecodeArgs, DecodeResult
from server.images.image_error import ImageError
from server.metrics.image_causes import ImageCause
from server.process.pipes import ATTEMPTS, KILLS, end_process, process_lost, wait_until_ready

PROCESSES = 2  # of an API process; they start when they are needed
WAIT_SECONDS = 30.0  # until an answer, whatever keeps a process waiting; see CPU_SECONDS
START_SECONDS = 30.0
MAX_WAITING = 256  # images of all requests
READ_BYTES = 1 << 20
# Of the environment: what Python needs to start, and no keys.
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class ImageDecoder:
    """Decodes images in processes that start with the first of them and end with this object."""

    def __init__(
        self,
        processes: int = PROCESSES,
        seconds: float = WAIT_SECONDS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="images")
        self._idle: list[DecodeProcess] = []  # at most as many as there are threads
        self._lock = threading.Lock()
        self._seconds = seconds
        self._waiting = 0
        self._max_waiting = max_waiting

    async def size(self, data: bytes, declared: str = "") -> tuple[int, int]:
        """Width and height as they are stored, without decoding.

        Raises ImageError, RateLimited, Unavailable.

        declared: the media type that the caller says it has; "" if none
        """
        result, _ = await self._call(DecodeArgs(len(data), declared), data)
        return result.width, result.height

    async def pixels(self, data: bytes, width: int, height: int) -> tuple[DecodeResult, bytes]:
        """The image's RGB bytes, resized to this and then turned upright, and what they are.

        Raises ImageError, RateLimited, Unavailable.
        """
        return await self._call(DecodeArgs(len(data), "", width, height), data)

    async def _call(self, args: DecodeArgs, data: bytes) -> tuple[DecodeResult, bytes]:
        if self._waiting >= self._max_waiting:
            raise full(
                "images_full", "{} images wait to be decoded: try again later", self._waiting
            )
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            result, raw = await loop.run_in_executor(self._threads, partial(self._ask, args, data))
        finally:
            self._waiting -= 1
        if result.error:
            raise ImageError(result.error, result.cause)
        return result, raw

    def _ask(self, args: DecodeArgs, data: bytes) -> tuple[DecodeResult, bytes]:
        for _ in range(ATTEMPTS):
            try:
                process = self._take()
            except (OSError, EOFError):
                break
            answer = self._answer(process, args, data)
            if answer is not None:
                return answer
        raise process_lost("decodes images")

    def _answer(
        self, process: DecodeProcess, args: DecodeArgs, data: bytes
    ) -> tuple[DecodeResult, bytes] | None:
        """None if the process was killed."""
        try:
            answer = process.ask(args, data, self._seconds)
        except TimeoutError:
            process.end()
            error = f"is not decoded after {self._seconds:g} s: make it smaller, or try again"
            cause: ImageCause = "size"
        except (OSError, EOFError):
            code, cause = process.end(0.5), "size"
            if code in KILLS:
                return None
            if code == -signal.SIGPROF:
                error = f"takes over {CPU_SECONDS:g} s to decode: make it smaller"
            else:
                cause = "damaged"
                how = signal.Signals(-code).name if code < 0 else f"code {code}"
                error = (
                    f"ended the process that decoded it ({how}): save it anew, or make it smaller"
                )
        else:
            with self._lock:
                self._idle.append(process)
            return answer
        return DecodeResult(error, cause=cause), b""

    def _take(self) -> DecodeProcess:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.runs():
                    return process
                process.end()  # it ended while it was not in use
        return DecodeProcess()

    def close(self) -> None:
        """End the processes; the next image starts another."""
        with self._lock:
            while self._idle:
                self._idle.pop().end()


class DecodeProcess:
    """One process of decode_worker.py."""

    def __init__(self) -> None:
        """Raises OSError, EOFError if it does not start."""
        command = [sys.executable, "-P", "-m", "server.images.decode_worker"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ},
        )
        self._end = weakref.finalize(self, end_process, self._process)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        try:
            self._read(1, time.monotonic() + START_SECONDS)  # it is ready
        except (OSError, EOFError):  # TimeoutError, too
            self._end()
            raise

    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self, grace_seconds: float = 0.0) -> int:
        """Its exit code.  It may end by itself within the grace, which keeps its own code."""
        if grace_seconds:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        self._end()
        return self._process.returncode

    def ask(self, args: DecodeArgs, data: bytes, seconds: float) -> tuple[DecodeResult, bytes]:
        """Raises TimeoutError, EOFError or another OSError if it has ended."""
        deadline = time.monotonic() + seconds
        head = msgspec.msgpack.encode(args)
        for part in (len(head).to_bytes(4, "little") + head, data):
            self._write(part, deadline)
        length = int.from_bytes(self._read(4, deadline), "little")
        result = msgspec.msgpack.decode(self._read(length, deadline), type=DecodeResult)
        return result, bytes(self._read(result.num_bytes, deadline))

    def _write(self, data: bytes, deadline: float) -> None:
        left = memoryview(data)
        while left:
            wait_until_ready(self._in, select.POLLOUT, deadline)
            left = left[os.write(self._in, left[:READ_BYTES]) :]

    def _read(self, size: int, deadline: float) -> bytearray:
        data = bytearray()
        while len(data) < size:
            wait_until_ready(self._out, select.POLLIN, deadline)
            chunk = os.read(self._out, min(READ_BYTES, size - len(data)))
            if not chunk:
                raise EOFError
            data += chunk
        return data
