"""Child: a process of the launcher, with its restarts and its stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import msgspec

log = logging.getLogger("wavefill.launcher")

MAX_DEATHS = 5
DEATHS_WITHIN_SECONDS = 60.0  # of service
# Of the environment, where the user has set nothing else.
DEFAULTS = {
    # Texts are tokenized one by one: the tokenizer's pool, a thread a core, would have no work.
    "TOKENIZERS_PARALLELISM": "false",
    # On a CPU PyTorch and oneDNN each keep a compiled kernel for every shape of a matrix, 1024 by
    # default, a quarter to half a MiB each.  Attention has new shapes for hours.
    "LRU_CACHE_CAPACITY": "256",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}


def describe(code: int) -> str:
    """How a process ended."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


class Child:
    """One child process, which the launcher restarts when it dies."""

    def __init__(
        self,
        name: str,
        module: str,
        fds: tuple[int, ...] = (),
        variables: Mapping[str, str] | None = None,
        ready_file: Path | None = None,
    ) -> None:
        """ready_file: one to which the process writes since when it serves, on the monotonic clock;
        None: it serves as soon as it runs."""
        self.name = name
        self._module = module
        self._fds = fds
        self.environment = {**DEFAULTS, **os.environ, **(variables or {})}
        self._process: asyncio.subprocess.Process | None = None
        self.ready_file = ready_file
        self._began = time.monotonic()
        self._served_seconds = 0.0  # by all processes that died
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)  # on the clock of _served_seconds

    async def start(self, message: object) -> None:
        """Run `python -m MODULE` with `message` as the first line of its stdin."""
        if self.ready_file is not None:
            self.ready_file.unlink(missing_ok=True)
        self._began = time.monotonic()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",  # the folder we were started in may hold a `server` or a `runtime` of its own
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=self._fds,
            env=self.environment,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        with contextlib.suppress(ConnectionError):  # it died at once: wait() returns its code
            await self._process.stdin.drain()

    def send(self, message: object) -> None:
        """A further line of its stdin; nothing if it does not run."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    @property
    def started(self) -> bool:
        return self._process is not None

    async def wait(self) -> int:
        assert self._process is not None
        return await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    def died(self) -> float | None:
        """Record a death; returns the seconds until the restart, None if it died too often.

        Counted are deaths within a minute of service: a model may load for longer than that, and
        what ends every engine while it loads, or soon after, has to end the restarts.
        """
        served = self._served_seconds = self._served_seconds + self._seconds_of_service()
        self._deaths.append(served)
        recent = [death for death in self._deaths if served - death < DEATHS_WITHIN_SECONDS]
        return None if len(recent) >= MAX_DEATHS else min(2.0 ** (len(recent) - 1), 30.0) / 2

    def _seconds_of_service(self) -> float:
        """Of the process that ended."""
        began = self._began
        if self.ready_file is not None:
            try:
                began = float(self.ready_file.read_text())
            except (OSError, ValueError):
                return 0.0
        return time.monotonic() - began

    async def stop(self, seconds: float) -> None:
        """Send SIGTERM, and SIGKILL if it still runs after `seconds`."""
        if self._process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.wait(), seconds)
        except TimeoutError:
            log.warning("%s did not end in %.0f s and is killed", self.name, seconds)
            self.signal(signal.SIGKILL)
            await self.wait()
