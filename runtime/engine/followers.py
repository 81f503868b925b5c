"""Followers: the processes of ranks 1 and up, which rank 0, the engine process, starts and watches.

They live and die together: a rank that ends ends the engine process with a message, whose launcher
then starts all of them anew, and followers end when the engine process closes their stdin.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import msgspec

from runtime.config import EngineConfig
from runtime.ipc.broadcast import BroadcastSender, Ends, RankLost
from runtime.logs import LogOptions, print_error

MODULE = "runtime.engine.rank_process"
CONFIGURATION_ERROR = 2  # exit code: the rank has said what is wrong
STALL_SECONDS = 30.0  # that a rank may be behind, or a step of a GPU may take
START_STALL_SECONDS = 300.0  # that a phase of a start may take in which ranks compute together
GC_THRESHOLD = 50_000  # allocations between two collections: a step makes hundreds, without cycles
LOOK_SECONDS = 1.0
END_SECONDS = 5.0
EXPLAIN_SECONDS = 1.0
OUT_OF_MEMORY = (
    "memory ran out in a step, perhaps because another program took what was free when the engine "
    "started: it starts again with what is free now; lower --gpu-memory if that comes back"
)


class RankArgs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of one rank's process, read from stdin."""

    config: EngineConfig
    rank: int
    store: str  # file by which ranks find each other
    memory: int  # descriptors of the ring of steps
    pipe: int
    logs: LogOptions
    host_free: int = 0  # as in EngineProcessArgs


class Followers:
    """The other ranks of a model, and the ring in which they find its steps."""

    def __init__(
        self, config: EngineConfig, store: str, logs: LogOptions, host_free: int = 0
    ) -> None:
        ends = Ends.create(config.tensor_parallel - 1)
        self._sender = BroadcastSender(ends, stall_seconds=STALL_SECONDS)
        self._stopping = False
        self._processes: list[subprocess.Popen[bytes]] = []
        for reader in range(config.tensor_parallel - 1):
            memory, pipe = ends.of_reader(reader)
            args = RankArgs(
                config=config,
                rank=reader + 1,
                store=store,
                memory=memory,
                pipe=pipe,
                logs=logs,
                host_free=host_free,
            )
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE],
                stdin=subprocess.PIPE,
                pass_fds=(memory, pipe),
            )
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # it died at once: the thread below says so
                process.stdin.write(msgspec.json.encode(args) + b"\n")
                process.stdin.flush()
            self._processes.append(process)
            name = f"rank-{reader + 1}"
            threading.Thread(target=self._watch, args=(reader + 1,), name=name, daemon=True).start()

    def _watch(self, rank: int) -> None:
        """End this process when the rank ends, since no step can be computed without it."""
        code = self._processes[rank - 1].wait()
        if self._stopping:
            return
        if code == CONFIGURATION_ERROR:
            self.fail("", CONFIGURATION_ERROR)
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        ranks = len(self._processes) + 1
        self.fail(f"rank {rank} of {ranks} ended with {ended}: all ranks start again")

    def fail(self, message: str, code: int = 1) -> None:
        """End all ranks at once, whatever their threads are waiting for."""
        if message:
            print_error(message)
        self._stopping = True
        for process in self._processes:
            process.kill()
        os._exit(code)

    def fail_between_ranks(self, reason: str) -> None:
        """As `fail`, after an error of a sum over all ranks."""
        time.sleep(EXPLAIN_SECONDS)  # if a rank has ended, the thread that waits for it says how
        self.fail(f"a rank hangs or cannot be reached ({reason}): all ranks start again")

    def send(self, message: bytes) -> None:
        """Let the other ranks do what the message says, after what was sent before."""
        try:
            self._sender.send(message)
        except RankLost as error:
            self.fail(f"{error}: all ranks start again")

    def stop(self) -> None:
        """End the other ranks; they have nothing to save."""
        self._stopping = True
        for process in self._processes:
            with suppress(OSError):
                if process.stdin is not None:
                    process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


class StallWatch:
    """Ends the process when a start, or then the engine's loop, has not gone on for a while.

    A GPU waits for ever within a sum to which another rank does not contribute, and no call of the
    host that waits for it can be interrupted.
    """

    def __init__(
        self,
        end: Callable[[str], None],
        seconds: float = START_STALL_SECONDS,
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._seconds, self._what = seconds, "the start has not gone on"
        self._end, self._look_seconds = end, look_seconds
        self._seen = time.monotonic()
        threading.Thread(target=self._run, name="stall-watch", daemon=True).start()

    def alive(self) -> None:
        self._seen = time.monotonic()

    def watch_steps(self, seconds: float = STALL_SECONDS) -> None:
        """The start is over: from now on it watches the loop."""
        self.alive()
        self._seconds, self._what = seconds, "a step has not ended"

    def _run(self) -> None:
        # The limit is read before what was seen, which watch_steps() notes before it lowers it.
        while self._seconds > time.monotonic() - self._seen:
            time.sleep(self._look_seconds)
        self._end(f"{self._what} for {self._seconds:.0f} s: a rank hangs; all ranks start again")
