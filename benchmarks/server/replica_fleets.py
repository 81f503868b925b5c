"""Servers of the built-in model behind a load balancer, one of which can be ended and replaced."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

DEPLOY = Path(__file__).parents[2] / "deploy"
START_SECONDS = 120.0
# What docs/replicas.md says of smg, after the URLs of the servers.
SMG_OPTIONS = (
    *("--policy", "cache_aware"),
    *("--health-check-interval-secs", "2", "--health-failure-threshold", "2"),
    *("--retry-max-backoff-ms", "1000", "--disable-tokenizer-autoload"),
)


class Fleet(Protocol):
    """What a cell of the table needs of the servers and what is in front of them."""

    port: int  # of the load balancer

    def long_port(self) -> int:
        """Where the long stream is asked for."""
        ...

    def choose_victim(self) -> None:
        """The long stream has begun: the server that answers it is the victim."""
        ...

    def end(self, number: signal.Signals) -> None: ...

    def replace(self) -> None:
        """Wait until the victim is gone, and start another one."""
        ...


@dataclass
class Replica:
    """A server of the built-in model that can be started again."""

    port: int
    log: Path
    options: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [Path(sys.executable).parent / "wavefill", "serve", "--port", str(self.port)]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [*command, "--device", "cpu", *self.options],
                env={**os.environ, "WAVEFILL_THREADS": "1"},
                stdout=sink,
                stderr=sink,
            )
        wait_ready(self.port, self.process, self.log)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for _ in range(2):  # the second one ends it without a drain
                self.process.terminate()
            self.process.wait(20)


@dataclass
class ServerFleet:
    """Servers of this machine, the first of which is the victim; a load balancer is in front."""

    port: int
    replicas: list[Replica]
    number: signal.Signals | None = None

    def long_port(self) -> int:
        return self.replicas[0].port

    def choose_victim(self) -> None:
        pass

    def end(self, number: signal.Signals) -> None:
        self.number = number
        victim = self.replicas[0].process
        assert victim is not None
        victim.send_signal(number)

    def replace(self) -> None:
        victim = self.replicas[0]
        assert victim.process is not None and self.number is not None
        code = victim.process.wait(60)
        expected = 0 if self.number == signal.SIGTERM else -self.number
        assert code == expected, f"exit code {code}"
        victim.start()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def get(port: int, path: str) -> tuple[int, bytes]:
    """Status and body; the status is 0 if nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path, path: str = "/readyz"):
    deadline = time.monotonic() + START_SECONDS
    while get(port, path)[0] != 200:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


@contextmanager
def nginx(folder: Path, policy: str, replicas: list[Replica]) -> Iterator[Fleet]:
    """nginx with deploy/nginx.conf and these ports, until the block ends."""
    text = (DEPLOY / "nginx.conf").read_text()
    if policy == "round robin":
        text = "".join(line for line in text.splitlines(True) if "least_conn;" not in line)
    file, log = folder / "nginx.conf", folder / "error.log"
    text = f"daemon off; pid {folder}/nginx.pid; error_log {log};\n{text}"
    command = [program("nginx"), "-p", folder, "-c", file, "-e", log]
    with _proxy(folder, file, text, command, replicas) as fleet:
        yield fleet


@contextmanager
def haproxy(folder: Path, replicas: list[Replica]) -> Iterator[Fleet]:
    """HAProxy with deploy/haproxy.cfg and these ports, until the block ends."""
    file = folder / "haproxy.cfg"
    text = (DEPLOY / "haproxy.cfg").read_text()
    with _proxy(folder, file, text, [program("haproxy"), "-f", file], replicas) as fleet:
        yield fleet


@contextmanager
def envoy(folder: Path, replicas: list[Replica]) -> Iterator[Fleet]:
    """Envoy with deploy/envoy.yaml and these ports, until the block ends."""
    file = folder / "envoy.yaml"
    text = (DEPLOY / "envoy.yaml").read_text()
    command = [program("envoy"), "--disable-hot-restart", "--concurrency", "2", "-c", file]
    with _proxy(folder, file, text, command, replicas) as fleet:
        yield fleet


def program(name: str) -> Path:
    """Where a load balancer is installed, with pip or for administrators."""
    own = Path(sys.executable).parent
    found = shutil.which(name, path=f"{own}:{os.environ['PATH']}:/usr/local/sbin:/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError(f"{name} is not installed")
    return Path(found)


@contextmanager
def _proxy(
    folder: Path, file: Path, text: str, command: list[str | Path], replicas: list[Replica]
) -> Iterator[Fleet]:
    """A program with the configuration `text` of deploy/, whose ports are replaced."""
    (port,) = free_ports(1)
    for written, own in (
        ("8000", port),
        *zip(("8001", "8002"), (replica.port for replica in replicas), strict=True),
    ):
        assert len(re.findall(rf"\b{written}\b", text)) == 1
        text = re.sub(rf"\b{written}\b", str(own), text)
    file.write_text(text)
    log = folder / f"{file.name}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        wait_ready(port, process, log)
        yield ServerFleet(port, replicas)
    finally:
        process.terminate()
        process.wait(20)


def smg_command() -> Path:
    return Path(sys.executable).parent / "smg"


@contextmanager
def smg(folder: Path, replicas: list[Replica], *options: str) -> Iterator[Fleet]:
    """The SGLang model gateway in front of the servers, until the block ends."""
    port, metrics_port = free_ports(2)
    urls = [f"http://127.0.0.1:{replica.port}" for replica in replicas]
    command = [smg_command(), "launch", "--worker-urls", *urls, *SMG_OPTIONS, *options]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    log = folder / f"smg-{port}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
    try:
        wait_ready(port, process, log, "/readiness")
        deadline = time.monotonic() + START_SECONDS
        while (listed := get(port, "/workers")[1]).count(b'"is_healthy":true') < len(replicas):
            assert time.monotonic() < deadline, listed
            time.sleep(0.1)
        yield ServerFleet(port, replicas)
    finally:
        process.kill()
        process.wait(20)
