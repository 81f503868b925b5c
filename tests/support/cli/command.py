"""The `wavefill` command as tests run it, and the settings that options of `serve` stand for."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from server.cli.commands import serve
from server.cli.flags import read_config_file
from server.config import ServerConfig

COMMAND = Path(sys.executable).parent / "wavefill"


def config(*words: str, **environment: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    args = parser.parse_args(words)
    return serve.requested_config(args, environment, read_config_file(args, environment))


def wavefill(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *words], capture_output=True, text=True, timeout=60)
