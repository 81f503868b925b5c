"""A decode step stays small enough to be read: few files take part in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.engine.trace_step import ON_A_GPU, traced_files

MAX_FILES = 15


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here")
def test_a_warmed_decode_row_runs_code_of_at_most_15_files(tmp_path: Path) -> None:
    found = traced_files(tmp_path)
    assert "runtime/scheduler/decode_columns.py" in found, "the trace sees the step"
    assert len(found.keys() | ON_A_GPU) <= MAX_FILES, sorted(found)
