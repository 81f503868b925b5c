"""The pipes of a child process that answers questions: waiting with a deadline, and its end."""

from __future__ import annotations

import select
import signal
import subprocess
import time

from server.errors import Unavailable

# Of programs that end others, as the system does when memory runs out: the question is asked again.
KILLS = (-signal.SIGKILL, -signal.SIGTERM)
ATTEMPTS = 2
PROCESS_LOST = "process_lost"  # a code


def wait_until_ready(descriptor: int, event: int, deadline: float) -> None:
    """Wait for an event of select.poll, until `deadline` by time.monotonic().

    Raises TimeoutError.
    """
    ready = select.poll()  # select.select takes no descriptor above 1023
    ready.register(descriptor, event)
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not ready.poll(remaining * 1000):
        raise TimeoutError


def process_lost(work: str) -> Unavailable:
    """No process could answer, which is not the fault of the question."""
    return Unavailable(
        "the process that {} was killed or could not be started: try again soon",
        work,
        code=PROCESS_LOST,
        retry_after_s=5,
    )


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and close its pipes; what was not written is lost."""
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            try:
                stream.close()
            except OSError:
                continue
