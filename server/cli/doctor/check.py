"""A check and its result, and running all of them at once within some seconds."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail"]


@dataclass(frozen=True)
class Result:
    """fail: a server cannot start or answer as it is; warn: it can, but see the remedy."""

    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """`run` gets the time of time.monotonic() at which it has to be done."""

    name: str
    run: Callable[[float], Result]


def run_all(checks: Sequence[Check], seconds: float) -> dict[str, Result]:
    """The results in order; all run at once, and one that takes longer is a warning."""
    results: dict[str, Result] = {}
    deadline = time.monotonic() + seconds

    def run(check: Check) -> None:
        try:
            results[check.name] = check.run(deadline)
        except subprocess.TimeoutExpired:
            pass
        except Exception as error:  # of this command, not of the machine
            reason = f"{type(error).__name__}: {error}"
            results[check.name] = Result("warn", f"could not be checked ({reason})")

    # Daemons: a call into a driver that hangs must not keep this command from its end.
    threads = [threading.Thread(target=run, args=(check,), daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = Result(
        "warn",
        f"no answer within {seconds:g} s",
        "the machine is busy, or reads slowly: try again with --seconds 60",
    )
    return {check.name: results.get(check.name, late) for check in checks}


def output_of(
    command: Sequence[str], deadline: float, env: Mapping[str, str] | None = None
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr.  Raises FileNotFoundError, subprocess.TimeoutExpired."""
    left = max(0.05, deadline - time.monotonic() - 0.05)
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=left,
        env=env,
    )
    return done.returncode, done.stdout, done.stderr
