"""The processes of the server that the soak runs: found, killed, and asked one by one."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable

import psutil

from benchmarks.server.replica_fleets import Replica
from benchmarks.server.soak_callers import request_bytes

NUM_APIS = 2
MAX_QUEUE = 64
OPTIONS = (
    *("--api-workers", str(NUM_APIS), "--max-num-seqs", "16", "--max-queue", str(MAX_QUEUE)),
    *("--kv-tokens", "3072", "--drain-seconds", "20"),
    *("--request-history", "100"),  # full soon, so that memory is level
)
ROLES = {
    "server.process.launcher": "launcher",
    "server.process.api_process": "API",
    "runtime.engine.process": "engine",
}
MOST_FILES_MORE = 16  # open files beyond those at the start: pipes and sockets to check grammars
COUNTS = {"engine": 1, "API": NUM_APIS}


class SoakServer:
    """The server as its operating system sees it."""

    def __init__(self, replica: Replica) -> None:
        assert replica.process is not None
        self.port, self._launcher = replica.port, psutil.Process(replica.process.pid)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """By role; those that check grammars are `other`."""
        found: dict[str, list[psutil.Process]] = {"launcher": [self._launcher]}
        for child in self._launcher.children(recursive=True):
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            role = next((role for module, role in ROLES.items() if module in words), "other")
            found.setdefault(role, []).append(child)
        return found

    def pids(self, role: str) -> set[int]:
        return {process.pid for process in self.processes().get(role, ())}

    def usage(self) -> tuple[dict[str, int], dict[str, int]]:
        """Resident bytes and open files of each role."""
        rss: dict[str, int] = {}
        files: dict[str, int] = {}
        for role, found in self.processes().items():
            try:
                rss[role] = sum(process.memory_info().rss for process in found)
                files[role] = sum(process.num_fds() for process in found)
            except psutil.Error:
                continue  # it has ended meanwhile
        return rss, files

    def kill(self, victim: psutil.Process) -> set[int]:
        """SIGKILL; returns the ports of the callers whose connections it had."""
        victim.suspend()  # so that it accepts no more
        ports = self._callers(victim)
        victim.send_signal(signal.SIGKILL)
        return ports

    def wait_recovered(self, role: str, old: int, served: Callable[[], bool]) -> None:
        """Until another process is in its place, all API processes are ready, and `served`."""
        deadline, ready = time.monotonic() + 60, set[int]()
        while time.monotonic() < deadline:
            pids = self.pids(role)
            if len(pids) == COUNTS[role] and old not in pids:
                pid, status, _ = self.ask("GET", "/readyz")
                ready = ready | {pid} if status == 200 else set()
                if ready >= self.pids("API") and served():
                    return
            time.sleep(0.02)

    def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, int, bytes]:
        """The API process that accepted a connection, the status and the body; 0, 0 if none did."""
        raw = b""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
                request = request_bytes(body, path, method)
                connection.sendall(request[:10])  # it stays open until the process is known
                pid = self._accepted_by(connection.getsockname()[1])
                connection.sendall(request[10:])
                while piece := connection.recv(65536):
                    raw += piece
        except OSError:
            return 0, 0, b""
        head, _, content = raw.partition(b"\r\n\r\n")
        return pid, int(head.split()[1]) if head else 0, content

    def _accepted_by(self, port: int) -> int:
        """The API process that has the caller's connection, once one has it."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for process in self.processes().get("API", ()):
                if port in self._callers(process):
                    return process.pid
            time.sleep(0.01)
        return 0

    def _callers(self, process: psutil.Process) -> set[int]:
        try:
            connections = process.net_connections("tcp")
        except psutil.Error:
            return set()
        return {
            each.raddr.port for each in connections if each.raddr and self.port == each.laddr.port
        }

    def load(self) -> dict[str, float]:
        """Requests and pages of the engine; empty while there is none."""
        _, status, body = self.ask("GET", "/v1/loads")
        return json.loads(body)["loads"][0] if status == 200 else {}

    def left_over(self, files_before: dict[str, int], seconds: float = 30.0) -> list[str]:
        """What is not free although all callers have gone, after so many seconds at most."""
        deadline, left = time.monotonic() + seconds, ["no answer"]
        while left and time.monotonic() < deadline:
            time.sleep(0.5)
            load, (_, files) = self.load(), self.usage()
            left = [] if load else ["/v1/loads has no answer"]
            for name in ("num_total_reqs", "num_used_tokens"):
                if load.get(name):
                    left.append(f"{name} is {load[name]}")
            for role, count in files_before.items():
                if files.get(role, 0) > count + MOST_FILES_MORE:
                    left.append(f"{role}: {files[role]} open files, {count} before")
        return [*(f"after the last request: {each}" for each in left), *self._slots_taken()]

    def _slots_taken(self) -> list[str]:
        """Whether each API process admits its whole share of the queue."""
        share, todo = MAX_QUEUE // NUM_APIS, self.pids("API")
        body = {"model": "tiny-chat", "prompt": "a", "max_tokens": 1, "n": share}
        deadline, problems = time.monotonic() + 60, list[str]()
        while todo and time.monotonic() < deadline:
            pid, status, content = self.ask("POST", "/v1/completions", json.dumps(body).encode())
            if status != 200 and pid in todo:
                problems.append(f"an idle API process refuses {share} sequences: {content!r}")
            todo.discard(pid)
        return [*problems, "not all API processes answer"] if todo else problems
