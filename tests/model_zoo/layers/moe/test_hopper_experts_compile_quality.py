"""What the compiler makes of the Hopper kernels of experts for an H100; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.kernels.compile_for_hopper import SHARED_LIMIT
from tests.support.kernels.shipped_experts import HOPPER_EXPERTS
from tests.support.paths import ROOT

# Minutes where Triton has not yet compiled the kernels and kept them.
pytestmark = [pytest.mark.compiled, pytest.mark.timeout(1200)]
SPILLED = 16  # bytes: in the epilogue, of a tile
SPILLED_IN_LOOP = {1: 0, 2: 0, 3: 8}  # loads and stores, by programs on a multiprocessor


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[dict[str, Any]]]:
    """The kernels of each call; compiled by a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.kernels.compile_for_hopper", *HOPPER_EXPERTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def count(operations: list[str], *beginnings: str) -> int:
    return sum(operation.startswith(beginnings) for operation in operations)


def test_one_token_is_two_launches_and_several_are_four(shipped: dict[str, list[dict[str, Any]]]):
    for name, found in shipped.items():
        products = ["_experts_product"] * 2
        more = ["_align", *products, "_sum_pairs"]
        assert [kernel["name"] for kernel in found] == (products if " at 1," in name else more)


@pytest.mark.parametrize("name", HOPPER_EXPERTS)
def test_products_fit_the_processor_and_convert_in_registers(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    tiles, _ = HOPPER_EXPERTS[name]
    for kernel in (kernel for kernel in shipped[name] if kernel["name"] == "_experts_product"):
        operations, hot = kernel["operations"], kernel["hot"]
        assert kernel["resident"] == tiles.resident and kernel["shared"] <= SHARED_LIMIT
        assert kernel["stack"] <= SPILLED
        assert count(hot, "LDL", "STL") <= SPILLED_IN_LOOP[tiles.resident]
        assert count(operations, "UTMALDG") >= 4
        used = "HMMA" if tiles.sync else "HGMMA"
        multiplied = count(operations, used)
        assert multiplied >= 8 and count(operations, "HMMA", "HGMMA") == multiplied
        if "bf16" not in name:
            bits = 4 if "mxfp4" in name else 8
            steps = multiplied // (max(1, tiles.rows // 8) if tiles.sync else 1)
            assert count(operations, "LDS.128") >= 8 * steps * bits // 128, "wide loads of words"
