"""A real server: the `wavefill` command with the built-in model, its processes and its sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx2 as httpx
from openai import AsyncOpenAI, OpenAI

START_SECONDS = 60


@dataclass(frozen=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path
    clients: list[OpenAI] = field(default_factory=list)  # closed with the server

    def client(self, **options: object) -> OpenAI:
        url = f"{self.url}/v1"
        self.clients.append(OpenAI(base_url=url, api_key="none", max_retries=0, **options))
        return self.clients[-1]

    def async_client(self, **options: object) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **options)

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name]
        values += [float(line.split(" ")[1]) for line in lines if line.startswith(f"{name} ")]
        assert values, f"no metric {name}"
        return sum(values)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s\n{self.log.read_text()}"
            time.sleep(0.05)

    def ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx.TransportError:
            return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(log: Path, *arguments: str, port: int | None = None) -> Server:
    port = port or free_port()
    command = Path(sys.executable).parent / "wavefill"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [command, "serve", "--port", str(port), "--device", "cpu", *arguments],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "WAVEFILL_THREADS": "1"},
            start_new_session=True,
        )
    server = Server(process, f"http://127.0.0.1:{port}", log)

    def answers() -> bool:
        assert process.poll() is None, f"the server ended\n{log.read_text()}"
        return server.ready()

    try:
        server.wait_until(answers, START_SECONDS)
    except BaseException:
        stop_server(server)
        raise
    return server


def stop_server(server: Server) -> None:
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        try:
            server.process.wait(15)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait(5)
    for client in server.clients:
        client.close()
