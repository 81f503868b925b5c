"""Requests lost when one of two replicas behind nginx is stopped or killed under load.

    python -m benchmarks.server.bench_replicas --requests 300

Starts two servers with the built-in model behind nginx with `deploy/nginx.conf`, and for each cell
of the table sends requests by 8 callers, stops the first server in the middle, and starts it again.
A long stream of that server is open meanwhile, so that its drain lasts as long as the cell.

An answer is lost unless it is complete: a status of 200 and a body or stream with its end.  `begun`
counts the lost ones of which something had arrived.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"
POLICIES = ("round robin", "least_conn")
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
START_SECONDS = 120.0
LONG_TOKENS = 1500


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
        deadline = time.monotonic() + START_SECONDS
        while status_of(self.port, "/readyz") != 200:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def end(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            for _ in range(2):  # the second one ends it without a drain
                self.process.terminate()
            self.process.wait(20)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)
        ]
        return [each.getsockname()[1] for each in sockets]


def status_of(port: int, path: str) -> int:
    """0 if it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


@contextmanager
def nginx(folder: Path, policy: str, port: int, replicas: list[Replica]) -> Iterator[None]:
    """nginx with deploy/nginx.conf and these ports, until the block ends."""
    text = CONFIGURATION.read_text()
    if policy == "round robin":
        text = "".join(line for line in text.splitlines(True) if "least_conn;" not in line)
    text = text.replace("listen 8000", f"listen 127.0.0.1:{port}")
    for replica, written in zip(replicas, ("127.0.0.1:8001", "127.0.0.1:8002"), strict=True):
        assert written in text
        text = text.replace(written, f"127.0.0.1:{replica.port}")
    file = folder / "nginx.conf"
    file.write_text(f"daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;\n{text}")
    binary = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert binary is not None, "nginx is not installed"
    process = subprocess.Popen([binary, "-p", folder, "-c", file, "-e", folder / "error.log"])
    try:
        deadline = time.monotonic() + 20
        while status_of(port, "/readyz") != 200:
            assert process.poll() is None, (folder / "error.log").read_text()
            assert time.monotonic() < deadline, "no server answers behind nginx"
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(20)


@dataclass
class Outcome:
    """What became of the requests of a cell."""

    complete: int = 0
    lost: int = 0
    begun: int = 0  # of the lost ones
    why: list[str] = field(default_factory=list)


def ask(port: int, streamed: bool, num_tokens: int) -> tuple[str, bool]:
    """Why the answer is lost ("" if it is complete), and whether it had begun."""
    body = {"model": "tiny-chat", "prompt": "once upon", "max_tokens": num_tokens}
    body |= {"ignore_eos": True, "stream": streamed}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    received = b""
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        while part := answer.read1(65536):
            received += part
        if answer.status != 200:
            return f"status {answer.status} {received[:200]!r}", False
    except (OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__} {error}", bool(received)
    finally:
        connection.close()
    if streamed:
        whole = received.endswith(b"data: [DONE]\n\n") and b'"error"' not in received
    else:
        whole = json.loads(received)["usage"]["completion_tokens"] == num_tokens
    return ("" if whole else f"incomplete: {received[-200:]!r}"), bool(received)


def run_cell(
    port: int,
    victim: Replica,
    number: signal.Signals,
    *,
    streamed: bool,
    num_requests: int,
    num_callers: int = 8,
    num_tokens: int = 8,
) -> tuple[Outcome, str]:
    """Requests to `port`, and a signal to `victim` after a third; also what its long stream got."""
    outcome, lock, numbers = Outcome(), threading.Lock(), itertools.count()
    long_stream: list[str] = []

    def stream_long() -> None:
        long_stream.append(ask(victim.port, True, LONG_TOKENS)[0])

    def call() -> None:
        while next(numbers) < num_requests:
            why, begun = ask(port, streamed, num_tokens)
            with lock:
                outcome.complete += not why
                outcome.lost += bool(why)
                outcome.begun += bool(why) and begun
                outcome.why += [why] if why else []

    long_caller = threading.Thread(target=stream_long)
    long_caller.start()
    time.sleep(0.5)
    callers = [threading.Thread(target=call) for _ in range(num_callers)]
    for caller in callers:
        caller.start()
    while outcome.complete + outcome.lost < num_requests // 3:
        time.sleep(0.01)
    victim.end(number)
    for caller in [*callers, long_caller]:
        caller.join()
    assert victim.process is not None
    code = victim.process.wait(60)
    expected = 0 if number == signal.SIGTERM else -number
    assert code == expected, f"exit code {code}"
    return outcome, long_stream[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=300, help="in each cell")
    parser.add_argument("--drain-delay", default="0", help="of the servers")
    args = parser.parse_args()
    print(f"{args.requests} requests a cell, 8 callers, --drain-delay {args.drain_delay}")
    print("| balancer | signal | answers | complete | lost | of them begun | long stream |")
    print("|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, (port, *ports) = Path(name), free_ports(3)
        options = ("--drain-delay", args.drain_delay)
        replicas = [Replica(each, folder / f"{each}.log", options) for each in ports]
        for replica in replicas:
            stack.callback(replica.stop)
            replica.start()
        for policy in POLICIES:
            with nginx(folder, policy, port, replicas):
                for number, streamed in itertools.product(SIGNALS, (False, True)):
                    outcome, long = run_cell(
                        port, replicas[0], number, streamed=streamed, num_requests=args.requests
                    )
                    kind = "streamed" if streamed else "whole"
                    print(
                        f"| {policy} | {number.name} | {kind} | {outcome.complete} | "
                        f"{outcome.lost} | {outcome.begun} | {'cut' if long else 'complete'} |",
                        flush=True,
                    )
                    for why in outcome.why[:3]:
                        print(f"    {why}", file=sys.stderr)
                    replicas[0].start()


if __name__ == "__main__":
    main()
