"""`wavefill plan [MODEL]`: what fits on a GPU and why, without loading weights."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys

import msgspec

from runtime.config import MAX_IMAGE_PIXELS, EngineConfig
from server.cli.config_file import add_config_argument, find_text
from server.cli.flags import (
    add_engine_flags,
    add_model_arguments,
    read_config_file,
    read_engine_flags,
    variables_for_cuda,
)
from server.cli.main import UsageError
from server.cli.model_source import BUILT_IN, CONFIG_ONLY, find_local, resolve_model
from server.images.options import OptionError, check_pixels

# In a process of its own: it loads PyTorch, which nothing of the server's does.
FIT_REPORT_COMMAND = (sys.executable, "-P", "-m", "runtime.startup.fit_report")
FLAGS = (
    *("device", "dtype", "attention", "kv_dtype", "state_dtype", "quantization", "load_format"),
    *("max_model_len", "max_num_seqs", "max_batched_tokens", "page_size", "kv_tokens"),
    *("gpu_memory", "max_image_pixels", "tensor_parallel", "expert_parallel", "data_parallel"),
)
UNITS = {"m": 2**20, "g": 2**30, "t": 2**40}
MIN_CARD, MAX_CARD = 2**30, 16 * 2**40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say what memory a model would take, how many tokens and requests the rest holds, and what "
        "would hold more.  Only config.json is read, and the headers of safetensors files where "
        "they are there.  Weights and KV are exact, the rest is estimated: a start measures it."
    )
    add_model_arguments(parser)
    add_config_argument(parser)
    parser.add_argument(
        "--card",
        metavar="SIZE",
        help="a GPU with so much memory, such as 24GiB or 80g, that need not be there; left out: "
        "this machine's device and what is free on it",
    )
    add_engine_flags(parser, FLAGS)


def run(args: argparse.Namespace) -> int:
    file = read_config_file(args, os.environ)
    requested = read_engine_flags(args, os.environ, FLAGS, file)
    try:
        check_pixels(int(requested.get("max_image_pixels", MAX_IMAGE_PIXELS)))
    except OptionError as error:
        raise UsageError(str(error)) from None
    card = card_bytes(args.card) if args.card else 0
    if card and requested.get("device") == "cpu":
        raise UsageError("--card and --device cpu: a card is a GPU's, leave one of them out")
    name = find_text("model", args, os.environ, file)[1] or BUILT_IN
    _, revision = find_text("revision", args, os.environ, file)
    local = find_local(name)
    directory, _ = local or resolve_model(name, revision or None, CONFIG_ONLY)
    config = EngineConfig(model=str(directory), **requested)
    question = msgspec.json.encode({"config": config, "card": card, "downloaded": local is None})
    environment = variables_for_cuda(os.environ)
    return subprocess.run(FIT_REPORT_COMMAND, input=question + b"\n", env=environment).returncode


def card_bytes(text: str) -> int:
    """80GiB, 80g, 80: gibibytes unless it says otherwise.  Raises UsageError; never 0."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mgt]?)(?:i?b)?", text.strip().lower())
    if found is None or not float(found[1]):
        raise UsageError(f"--card {text}: a size such as 24GiB or 80g is needed")
    size = float(found[1]) * UNITS[found[2] or "g"]
    if not MIN_CARD <= size <= MAX_CARD:
        raise UsageError(f"--card {text}: no GPU has so much memory, or so little: 1GiB to 16TiB")
    return int(size)
