"""`wavefill formats [MODEL]`: how each kind of layer is stored, how it runs, and the error."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

import msgspec

from runtime.config import EngineConfig
from server.cli.flags import (
    add_engine_flags,
    add_model_arguments,
    read_engine_flags,
    variables_for_cuda,
)
from server.cli.main import UsageError
from server.cli.model_source import BUILT_IN, CONFIG_ONLY, resolve_model

# In a process of its own: it loads PyTorch, which nothing of the server's does.
FORMAT_REPORT_COMMAND = (sys.executable, "-P", "-m", "runtime.startup.format_report")
FLAGS = ("device", "dtype", "quantization")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say for each kind of linear layer how the checkpoint stores it, how it runs on a device, "
        "the bytes of both, and the error of the weights that run against the stored numbers (root "
        "mean square, of the first layer of each kind).  A model that is not downloaded is judged "
        "by its config files alone."
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--capability",
        metavar="X.Y",
        help="the compute capability of a GPU that need not be there, such as 9.0 of an H100 or "
        "H200; left out: this machine's device",
    )
    add_engine_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    requested = read_engine_flags(args, os.environ, FLAGS)
    capability = capability_of(args.capability) if args.capability else None
    if capability and requested.get("device") == "cpu":
        raise UsageError("--capability and --device cpu: a capability is a GPU's, leave one out")
    name = args.model or os.environ.get("WAVEFILL_MODEL") or BUILT_IN
    directory, _ = resolve_model(name, args.revision, CONFIG_ONLY)
    config = EngineConfig(model=str(directory), **requested)
    question = msgspec.json.encode({"config": config, "capability": capability})
    environment = variables_for_cuda(os.environ)
    return subprocess.run(FORMAT_REPORT_COMMAND, input=question + b"\n", env=environment).returncode


def capability_of(text: str) -> tuple[int, int]:
    """`9.0` -> (9, 0).  Raises UsageError."""
    found = re.fullmatch(r"(\d{1,2})\.(\d)", text.strip())
    if found is None:
        raise UsageError(f"--capability {text}: two numbers such as 8.0, 8.9 or 9.0 are needed")
    return int(found[1]), int(found[2])
