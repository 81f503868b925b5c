"""The pipes of a child process that answers questions: waiting with a deadline, and its end."""

from __future__ import annotations

import select
import subprocess
import time


def wait_until_ready(descriptor: int, event: int, deadline: float) -> None:
    """Wait for an event of select.poll, until `deadline` by time.monotonic().

    Raises TimeoutError.
    """
    ready = select.poll()  # select.select takes no descriptor above 1023
    ready.register(descriptor, event)
    remaining = deadline - time.monotonic()
    if remaining <= 0 or not ready.poll(remaining * 1000):
        raise TimeoutError


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
