"""Requests lost when one of two replicas is stopped or killed under load.

    pip install 'wavefill[deploy]'
    python -m benchmarks.server.bench_replicas --requests 300 [--balancers smg "Ray Serve" ...]

Starts two servers with the built-in model behind nginx, HAProxy or Envoy with their configuration
in `deploy/`, behind smg, or on a Ray cluster with `deploy/ray_serve.py`.  In each cell of the
table, 8 callers send requests, and one server is stopped in the middle and replaced.  A long stream
of that server is open meanwhile, so that its drain lasts as long as the cell.

An answer is lost unless it is complete: a status of 200 and a body or stream with its end.  `begun`
counts the lost ones of which something had arrived.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.server.ray_fleet import ray_cluster
from benchmarks.server.replica_fleets import (
    Fleet,
    Replica,
    envoy,
    free_ports,
    haproxy,
    nginx,
    smg,
)

NGINX_POLICIES = ("round robin", "least_conn")
OTHERS = {"HAProxy": haproxy, "Envoy": envoy, "smg": smg}
BALANCERS = (*(f"nginx, {policy}" for policy in NGINX_POLICIES), *OTHERS, "Ray Serve")
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
LONG_TOKENS = 1500
DRAIN_SECONDS = 120  # a slow machine may take this long for the long stream


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
    fleet: Fleet,
    number: signal.Signals,
    *,
    streamed: bool,
    num_requests: int,
    num_callers: int = 8,
    num_tokens: int = 8,
) -> tuple[Outcome, str]:
    """Requests to a fleet, and a signal to its victim after a third.

    Also why the long stream that the victim answers meanwhile was cut ("" if it is complete).  The
    victim is replaced before this returns.
    """
    outcome, lock, numbers = Outcome(), threading.Lock(), itertools.count()
    long_stream: list[str] = []

    def stream_long() -> None:
        long_stream.append(ask(fleet.long_port(), True, LONG_TOKENS)[0])

    def call() -> None:
        while next(numbers) < num_requests:
            why, begun = ask(fleet.port, streamed, num_tokens)
            with lock:
                outcome.complete += not why
                outcome.lost += bool(why)
                outcome.begun += bool(why) and begun
                outcome.why += [why] if why else []

    long_caller = threading.Thread(target=stream_long)
    long_caller.start()
    time.sleep(0.5)
    fleet.choose_victim()
    callers = [threading.Thread(target=call) for _ in range(num_callers)]
    for caller in callers:
        caller.start()
    while outcome.complete + outcome.lost < num_requests // 3:
        time.sleep(0.01)
    fleet.end(number)
    for caller in [*callers, long_caller]:
        caller.join()
    fleet.replace()
    return outcome, long_stream[0]


def table_of(fleet: Fleet, balancer: str, num_requests: int) -> None:
    for number, streamed in itertools.product(SIGNALS, (False, True)):
        outcome, long = run_cell(fleet, number, streamed=streamed, num_requests=num_requests)
        kind = "streamed" if streamed else "whole"
        print(
            f"| {balancer} | {number.name} | {kind} | {outcome.complete} | "
            f"{outcome.lost} | {outcome.begun} | {'cut' if long else 'complete'} |",
            flush=True,
        )
        for why in [*outcome.why[:3], *([f"long stream: {long}"] if long else [])]:
            print(f"    {why}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=300, help="in each cell")
    parser.add_argument("--drain-delay", default="0", help="of the servers, but on Ray")
    parser.add_argument("--balancers", nargs="*", choices=BALANCERS, default=BALANCERS)
    args = parser.parse_args()
    print(f"{args.requests} requests a cell, 8 callers, --drain-delay {args.drain_delay}")
    print("| balancer | signal | answers | complete | lost | of them begun | long stream |")
    print("|---|---|---|---|---|---|---|", flush=True)
    chosen = list(args.balancers)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        options = ("--drain-delay", args.drain_delay, "--drain-seconds", str(DRAIN_SECONDS))
        if "Ray Serve" in chosen:
            with ray_cluster(folder, drain_seconds=DRAIN_SECONDS) as fleet:
                table_of(fleet, "Ray Serve", args.requests)
            chosen.remove("Ray Serve")
        replicas = [Replica(port, folder / f"{port}.log", options) for port in free_ports(2)]
        for replica in replicas if chosen else ():
            stack.callback(replica.stop)
            replica.start()
        for balancer in chosen:
            with (
                OTHERS[balancer](folder, replicas)
                if balancer in OTHERS
                else nginx(folder, balancer.removeprefix("nginx, "), replicas) as fleet
            ):
                table_of(fleet, balancer, args.requests)


if __name__ == "__main__":
    main()
