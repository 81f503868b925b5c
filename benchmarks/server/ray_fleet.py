"""Replicas on a Ray cluster of two nodes and a head, as one of the fleets of the table."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.server.replica_fleets import free_ports, get


@dataclass
class RayFleet:
    """Servers on nodes of a cluster, which `ray_cluster` runs as a process."""

    port: int
    process: subprocess.Popen[str]
    log: Path
    victim: int = 0  # the port of its server
    number: signal.Signals | None = None
    ended: threading.Thread = field(default_factory=threading.Thread)

    def command(self, line: str) -> list[int]:
        """The ports of the servers, once it is done."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> list[int]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-5000:]
        return json.loads(line)

    def long_port(self) -> int:
        return self.port

    def running(self, port: int) -> int:
        """Requests that the server on this port computes now."""
        return json.loads(get(port, "/v1/loads")[1])["loads"][0]["num_running_reqs"]

    def choose_victim(self) -> None:
        deadline = time.monotonic() + 60
        while not (busy := [port for port in self.command("servers") if self.running(port)]):
            assert time.monotonic() < deadline, "the long stream has not begun"
            time.sleep(0.1)
        (self.victim,) = busy

    def end(self, number: signal.Signals) -> None:
        """Ray's way to say SIGTERM to a node is to drain it."""
        self.number = number
        verb = "drain" if number == signal.SIGTERM else "kill"
        self.ended = threading.Thread(target=self.command, args=[f"{verb} {self.victim}"])
        self.ended.start()

    def replace(self) -> None:
        self.ended.join()
        if self.number == signal.SIGKILL:  # a drain has put another node in its place
            self.command("add")
        self.command("ready")


@contextmanager
def ray_cluster(folder: Path, **options: object) -> Iterator[RayFleet]:
    (port,) = free_ports(1)
    log = folder / "ray.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.server.ray_cluster", str(port), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
        )
    fleet = RayFleet(port, process, log)
    try:
        fleet.answer()
        yield fleet
    finally:
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended: what it said last was the error
            process.stdin.close()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
