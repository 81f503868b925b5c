"""Runs a module of tests under compute-sanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.support.paths import ROOT


def check_sanitized(tool: str, module: str, names: list[str], *, seconds: int = 280) -> None:
    """Assert that `tool` reports no error in `python -m MODULE NAMES`, and that the module passes.

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
            *(sys.executable, "-m", module, *names),
        ],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",  # each tensor ends where its memory does
        },
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
