"""`wavefill tune`: measure the GPU for the split planners."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

# In a process of its own: it loads PyTorch, which nothing of the server's does.
TUNE_COMMAND = (sys.executable, "-m", "attention.planner.tuning")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure what reading keys and values costs on this machine's GPU, for the planners that "
        "--split-planner chooses from.  Takes about a minute on an idle GPU, writes a file in the "
        "user's cache, and servers that are started afterwards plan by it."
    )


def run(args: argparse.Namespace) -> int:
    return subprocess.run(TUNE_COMMAND, env=os.environ | {"PYTHONUNBUFFERED": "1"}).returncode
