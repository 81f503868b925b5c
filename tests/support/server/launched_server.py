"""The real launcher with an engine without a model, as a process; and a reader of its streams."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import psutil

REQUEST = {"model": "tiny-chat", "prompt": "once upon", "ignore_eos": True, "temperature": 0}
ENDLESS = {**REQUEST, "max_tokens": 2000, "stream": True}


@dataclass(frozen=True)
class LaunchedServer:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    folder: Path  # where it makes the directory of its sockets

    def get(self, path: str) -> httpx.Response:
        # Certificates are loaded for `verify`, though no URL of ours has TLS: 30 ms a request.
        return httpx.get(self.url + path, timeout=5, verify=False)

    def status(self, path: str = "/health") -> int:
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return 0

    def wait_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s\n{self.log.read_text()}"
            time.sleep(0.02)

    def connects(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1])), 5).close()
        except ConnectionRefusedError:
            return False
        return True

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, module: str) -> psutil.Process:
        return next(child for child in self.children() if module in child.cmdline())

    def has(self, module: str) -> bool:
        return any(module in child.cmdline() for child in self.children())


STUB_ENGINE = "tests.support.server.stub_engine"
Start = Callable[..., LaunchedServer]


def alive(process: psutil.Process) -> bool:
    """Whether it runs; a zombie that init has not reaped yet does not."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_all_end(family: list[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [process for process in family if alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def serving(start: Start, api_workers: int = 1, **options: object) -> LaunchedServer:
    launched = start(api_workers=api_workers, **options)
    launched.wait_until(lambda: launched.status() == 200)
    return launched


class LineStream(threading.Thread):
    """Reads an endless answer until something ends it."""

    def __init__(self, launched: LaunchedServer, **changes: object) -> None:
        super().__init__()
        self._url, self._body = f"{launched.url}/v1/completions", {**ENDLESS, **changes}
        self.lines: list[str] = []
        self.broken = False
        self.start()
        launched.wait_until(lambda: len(self.lines) > 2)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=30) as response:
                for line in response.iter_lines():
                    if line:
                        self.lines.append(line)
        except httpx.TransportError:
            self.broken = True

    def ended(self) -> list[str]:
        self.join(20)
        assert not self.is_alive()
        return self.lines
