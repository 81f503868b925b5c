"""Runs a program in which kernels are compiled ones: this process may interpret them."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import ROOT


def run_uninterpreted(program: str) -> str:
    """What the program prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout
