"""What the compiler makes of the all-reduce for an H100; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.paths import ROOT

NAMES = (
    "all_reduce_add_norm over 2",
    "all_reduce_add_norm over 4",
    "all_reduce_add_norm_quantize over 2",
)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[dict[str, Any]]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.kernels.compile_for_hopper", *NAMES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_parts_are_read_by_16_bytes_and_nothing_is_spilled(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    (kernel,) = shipped[name]
    operations, world = kernel["operations"], int(name[-1])
    assert kernel["stack"] == 0
    # Rows of 4096: 4 loads a thread of the weight, of the residual and of each rank's part.
    assert sum(each.startswith("LDG.E.128") for each in operations) == 4 * (world + 2)
    assert not any(each.startswith("LDG.E.U16") for each in operations)
    # Two programs of every SM are resident: each waits for its counterpart on the other ranks.
    assert kernel["resident"] >= 4


@pytest.mark.parametrize("name", NAMES)
def test_no_thread_can_read_an_epoch_that_another_one_has_already_raised(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    """All threads read it, one writes it: a barrier stands between."""
    (kernel,) = shipped[name]
    operations = kernel["operations"]
    reads = operations.index("LDG.E")
    written = operations.index("STG.E")
    assert any(each.startswith("BAR.SYNC") for each in operations[reads:written])
    # Signals: a fence for the system before each, and what is read is not in the first cache.
    assert sum("EXCH.STRONG.SYS" in each for each in operations) == int(name[-1]) - 1
    assert "MEMBAR.ALL.SYS" in operations[: operations.index("CCTL.IVALL")]
