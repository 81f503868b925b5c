"""`wavefill plan` and `wavefill formats` within a test's process, which has loaded PyTorch.

The command and the process that computes its report would take two seconds to load it again.
"""

from __future__ import annotations

import importlib
import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from server.cli.commands import formats, plan
from server.cli.main import main


def wavefill_here(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What the command would end with and print."""
    here: Any = SimpleNamespace(run=_report)
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(plan, "subprocess", here),
        mock.patch.object(formats, "subprocess", here),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        code = _code_of(lambda: main([str(word) for word in words]))
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def _report(command: Sequence[str], *, input: bytes, env: Mapping[str, str]) -> SimpleNamespace:
    """Stands for subprocess.run of `python -m MODULE`."""
    module = importlib.import_module(command[-1])
    with (
        mock.patch.dict(os.environ, env, clear=True),
        mock.patch.object(sys, "stdin", io.StringIO(input.decode())),
    ):
        return SimpleNamespace(returncode=_code_of(module.main))


def _code_of(ends: Any) -> int:
    try:
        ends()
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return 0
