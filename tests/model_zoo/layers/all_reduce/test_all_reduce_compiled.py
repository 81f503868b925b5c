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
TWO_NORMS = ("all_reduce_two_norms_quantize over 4", "all_reduce_two_norms_quantize over 8")
# Minutes where Triton has not yet compiled the kernels and kept them.
pytestmark = [pytest.mark.compiled, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[dict[str, Any]]]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.kernels.compile_for_hopper", *NAMES, *TWO_NORMS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_read_and_sent_by_16_bytes_and_nothing_is_spilled(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    (kernel,) = shipped[name]
    operations, others = kernel["operations"], int(name[-1]) - 1
    assert kernel["stack"] == 0
    # Rows of 4096: 4 loads a thread of the weight, of the residual, and of the part, which is read
    # to be added and in three places to be sent: the first two rows, and the next one in the loop.
    assert operations.count("LDG.E.128") == 4 * (3 + 3)
    # What comes is read once, and again while it is waited for; never from the first cache.
    assert operations.count("LDG.E.128.STRONG.SYS") == 2 * 4 * others
    # To each of the others, over what has come from it, and the sum; a norm that is not quantized.
    norms = 0 if "quantize" in name else 4
    assert operations.count("STG.E.128") >= 4 * ((3 + 1) * others + 1) + norms
    assert not any(each.startswith(("LDG.E.U16", "STG.E.U16")) for each in operations)
    # Two programs of every SM are resident: each waits for its counterpart on the other ranks.
    assert kernel["resident"] >= 2


@pytest.mark.parametrize("name", TWO_NORMS)
def test_two_programs_of_two_norms_fit_on_a_multiprocessor_as_well(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    """As many as a launch has: one that is not resident would keep its counterparts waiting."""
    (kernel,) = shipped[name]
    assert kernel["resident"] >= 2


@pytest.mark.parametrize("name", NAMES)
def test_no_thread_overwrites_what_another_one_has_not_read(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    """All threads have seen that all has come when a thread says that nothing has."""
    operations = shipped[name][0]["operations"]
    last = max(i for i, each in enumerate(operations) if each == "LDG.E.128.STRONG.SYS")
    store = operations.index("STG.E.128", last)
    assert any(each.startswith("BAR.SYNC") for each in operations[last:store])
