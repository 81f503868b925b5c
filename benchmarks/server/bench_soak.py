"""A server at saturation for a while, with everything that goes wrong in production.

    python -m benchmarks.server.bench_soak --seconds 600          # or: make soak

Starts the built-in model with two API processes, few slots and few KV pages, so that requests wait
and are preempted all the time.  Callers stream, read slowly, leave, ask for JSON, and send wrong
requests.  In the first half, the engine and an API process are killed in turn; the second half has
no kills, so that the memory of the same processes can be compared over it.  The exit code is 1 if
one of these is not so:

- Every request has one end: a complete answer with all of its tokens, one error event, or a refusal
  with its status.  An error is one of an engine that was killed while the request was open, and an
  answer without an end is one of an API process that had its connection when it was killed.
- A killed process is replaced, all API processes are ready, and a request that was sent after the
  kill has its complete answer, within 10 seconds (99th percentile).
- In the second half no process ends, and the resident memory of each kind of process grows by less
  than 5 % or 8 MiB, whichever is more, from its first to its last third (in a soak of 400 seconds
  or more).
- Afterwards no request runs or waits, no KV page is in use, no file is open that was not at the
  start, each API process admits its whole share of the queue, SIGTERM ends every process, and the
  log has no traceback.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.server.replica_fleets import Replica, free_ports
from benchmarks.server.soak_answers import ENDS
from benchmarks.server.soak_callers import LEAVING, VALID, Seen, call
from benchmarks.server.soak_server import OPTIONS, SoakServer

NUM_CALLERS = 48
KILL_SECONDS = 15.0  # from one kill to the next
SAMPLE_SECONDS = 2.0
MOST_GROWTH, MOST_GROWTH_MIB = 0.05, 8.0
MOST_RECOVERY = 10.0
# From a kill to when a caller may notice: one that reads slowly reads what was sent before first.
NOTICED_SECONDS = 30.0
LEAST_SECONDS = 60.0  # for a kill of each kind
# In a shorter soak memory is printed only: that of a new engine grows in its first minute or two.
LEAST_SECONDS_OF_MEMORY = 400.0


@dataclass
class Kill:
    """A process that was killed; `ports` are those of the callers whose connections it had."""

    role: str
    at: float
    ports: set[int] = field(default_factory=set)
    recovery: float = float("inf")


@dataclass
class Sample:
    """What the processes held at a time."""

    at: float
    rss: dict[str, int]  # bytes by role
    pids: dict[str, set[int]]
    pages: float | None  # the share in use, if it was to be had


@dataclass
class Record:
    """What was seen during the soak."""

    ends: collections.Counter[tuple[str, str]] = field(default_factory=collections.Counter)
    tokens: int = 0
    slowest: float = 0.0  # seconds of a complete answer
    latest_complete: float = 0.0  # when the latest request began that has a complete answer
    problems: list[str] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def add(self, seen: Seen, began: float, ended: float) -> None:
        end, detail, tokens = seen.outcome
        self.ends[seen.kind, end] += 1
        self.tokens += tokens
        if end == "complete":
            self.latest_complete = max(self.latest_complete, began)
            self.slowest = max(self.slowest, ended - began)
        if end == "wrong" or (end in ("broken", "error") and not self.excused(seen, began, ended)):
            self.problems.append(f"{began:.1f} to {ended:.1f} s: {seen.kind} {end}: {detail}")

    def excused(self, seen: Seen, began: float, ended: float) -> bool:
        """Whether a kill explains an answer that ended with an error or without an end."""
        during = [kill for kill in self.kills if began <= kill.at >= ended - NOTICED_SECONDS]
        if seen.outcome.end == "error":
            return any(kill.role == "engine" for kill in during)
        return any(kill.role == "API" and seen.port in kill.ports for kill in during)


class Soak:
    """The callers of a server, and what is done to it."""

    def __init__(self, server: SoakServer, seconds: float, seed: int) -> None:
        self.server, self.seconds, self.record = server, seconds, Record()
        self.rng, self.start = random.Random(seed), time.monotonic()

    @property
    def now(self) -> float:
        return time.monotonic() - self.start

    async def run(self) -> Record:
        callers = [self.caller(self.rng.random()) for _ in range(NUM_CALLERS)]
        await asyncio.gather(*callers, self.kill_in_turn(), self.sample())
        return self.record

    async def caller(self, seed: float) -> None:
        rng = random.Random(seed)
        while self.now < self.seconds:
            began = self.now
            seen = await call(self.server.port, rng)
            self.record.add(seen, began, self.now)
            if seen.outcome.end in ("busy", "broken"):
                await asyncio.sleep(0.2 + 0.3 * rng.random())

    async def kill_in_turn(self) -> None:
        interval = min(KILL_SECONDS, self.seconds / 10)
        role = "engine"
        await asyncio.sleep(interval)
        while self.now < self.seconds / 2 - interval:
            victim = self.rng.choice(self.server.processes()[role])
            kill = Kill(role, self.now)
            self.record.kills.append(kill)
            kill.ports = self.server.kill(victim)
            await asyncio.to_thread(
                self.server.wait_recovered,
                role,
                victim.pid,
                lambda at=kill.at: self.record.latest_complete > at,
            )
            kill.recovery = self.now - kill.at
            role = "API" if role == "engine" else "engine"
            await asyncio.sleep(max(0.0, interval - kill.recovery))

    async def sample(self) -> None:
        while self.now < self.seconds:
            (rss, _), processes = self.server.usage(), self.server.processes()
            pids = {role: {each.pid for each in found} for role, found in processes.items()}
            load = await asyncio.to_thread(self.server.load)
            self.record.samples.append(Sample(self.now, rss, pids, load.get("token_usage")))
            await asyncio.sleep(SAMPLE_SECONDS)


def percentile_99(values: list[float]) -> float:
    """The nearest rank."""
    return sorted(values)[max(0, -(-99 * len(values) // 100) - 1)]


def problems_of_ends(record: Record) -> list[str]:
    """Kinds of requests none of which had the end that they should have."""
    expected = {kind: "left" if kind in LEAVING else "complete" for kind in VALID}
    expected["wrong"] = "refused"
    return [
        f"no request of the kind {kind!r} is {end}"
        for kind, end in expected.items()
        if not record.ends[kind, end]
    ]


def problems_of_kills(record: Record) -> list[str]:
    """Print how long recovery took; what took too long."""
    problems: list[str] = []
    for role in ("engine", "API"):
        took = [kill.recovery for kill in record.kills if kill.role == role]
        if not took:
            problems.append(f"no {role} process was killed")
            continue
        slowest = percentile_99(took)
        median = statistics.median(took)
        print(f"{role}: {len(took)} kills, recovery median {median:.1f} s, p99 {slowest:.1f} s")
        if slowest > MOST_RECOVERY:
            problems.append(f"recovery of the {role} took {slowest:.1f} s")
    return problems


def problems_of_processes(samples: list[Sample], half: float) -> list[str]:
    """Print the memory in each third of the second half; what grew, and who ended."""
    second = [sample for sample in samples if sample.at >= half]
    problems: list[str] = []
    for role in ("launcher", "API", "engine", "other"):
        thirds: list[list[float]] = [[], [], []]
        for each in second:
            if role in each.rss:
                thirds[min(2, int(3 * (each.at - half) / half))].append(each.rss[role] / 2**20)
        if not all(thirds):
            problems.append(f"there are too few samples of {role}")
            continue
        first, middle, last = map(statistics.median, thirds)
        print(f"RSS of {role}: {first:.1f}, {middle:.1f}, {last:.1f} MiB")
        judged = half >= LEAST_SECONDS_OF_MEMORY / 2
        if judged and last - first > max(first * MOST_GROWTH, MOST_GROWTH_MIB):
            problems.append(f"RSS of {role} grew from {first:.1f} to {last:.1f} MiB")
        if any(each.pids.get(role) != second[0].pids.get(role) for each in second):
            problems.append(f"a process ended that was not killed: {role}")
    return problems


def report(record: Record, seconds: float) -> list[str]:
    """Print the figures; what is not as it should be."""
    kinds = sorted({kind for kind, _ in record.ends})
    print(f"{seconds:.0f} s, {NUM_CALLERS} callers, {sum(record.ends.values())} requests")
    print(f"| | {' | '.join(ENDS)} |\n|---|{'---|' * len(ENDS)}")
    for kind in kinds:
        print(f"| {kind} | {' | '.join(str(record.ends[kind, end]) for end in ENDS)} |")
    problems = [
        *record.problems,
        *problems_of_ends(record),
        *problems_of_kills(record),
        *problems_of_processes(record.samples, seconds / 2),
    ]
    pages = [each.pages for each in record.samples if each.pages is not None]
    if pages:
        print(f"KV pages in use: median {statistics.median(pages):.0%}, most {max(pages):.0%}")
    print(
        f"complete answers: {record.tokens / seconds:.0f} tokens/s, slowest {record.slowest:.1f} s"
    )
    return problems


def problems_of_stop(replica: Replica, server: SoakServer) -> list[str]:
    """SIGTERM to a server without requests: its exit code, and processes that it leaves."""
    processes = [each for found in server.processes().values() for each in found]
    assert replica.process is not None
    replica.process.terminate()
    _, alive = psutil.wait_procs(processes, timeout=30)
    code = replica.process.wait(1) if replica.process.pid not in {e.pid for e in alive} else None
    problems = [f"after SIGTERM {each.pid} still runs" for each in alive]
    return problems if code == 0 else [*problems, f"the exit code is {code}"]


def soak(folder: Path, seconds: float, seed: int) -> tuple[list[str], str]:
    """What is not as it should be, and the server's log."""
    (port,) = free_ports(1)
    replica = Replica(port, folder / "server.log", OPTIONS)
    try:
        replica.start()
        server = SoakServer(replica)
        _, files = server.usage()
        record = asyncio.run(Soak(server, seconds, seed).run())
        problems = [*report(record, seconds), *server.left_over(files)]
        problems += problems_of_stop(replica, server)
    finally:
        replica.stop()
    log = replica.log.read_text()
    return [*problems, *(["the log has a traceback"] if "Traceback" in log else [])], log


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.seconds < LEAST_SECONDS:
        parser.error(f"--seconds {args.seconds:g} is too few for kills: {LEAST_SECONDS:g} or more")
    with tempfile.TemporaryDirectory() as name:
        problems, log = soak(Path(name), args.seconds, args.seed)
    for problem in problems[:40]:
        print(problem, file=sys.stderr)
    if problems:
        print(f"{len(problems)} problems; the log ends:\n{log[-3000:]}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
