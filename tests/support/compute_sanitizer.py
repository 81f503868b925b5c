"""Runs a script of tests under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent


def check_sanitized(tool: str, script: str, names: list[str], *, seconds: int = 280) -> None:
    """Assert that `tool` has nothing to say of tests/SCRIPT NAMES, and that the script passes.

    tool  memcheck (accesses out of bounds), racecheck (threads of a program that write and read one
          place in no order) or initcheck (reads of what was never written)
    """
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path="/usr/local/cuda/bin"
    )
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    done = subprocess.run(
        [
            *(sanitizer, "--tool", tool, "--error-exitcode", "9"),
            *(sys.executable, SUPPORT / script, *names),
        ],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                [str(SUPPORT.parents[1]), str(SUPPORT), os.environ.get("PYTHONPATH", "")]
            ),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # each tensor ends where its memory does
        },
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
