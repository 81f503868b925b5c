"""What the compiler makes of the experts' kernels for H100 and A100; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.kernels.shipped_experts import EXPERTS, FORMATS
from tests.support.paths import ROOT

# Minutes where Triton has not yet compiled the kernels and kept them.
pytestmark = [pytest.mark.compiled, pytest.mark.timeout(1200)]

# The default tiles of every format for few tokens and for many, and all that is no tile's.
OTHERS = "router", "fused router", "some experts", "experts invariant"
NAMES = [
    *(name for name in EXPERTS if name.startswith(OTHERS)),
    *(
        f"experts {weights or 'bf16'} at {tokens}, 0"
        for weights in FORMATS
        for tokens in (8, 32, 8192)
    ),
]


@pytest.fixture(scope="module", params=["--hopper", "--ampere"])
def shipped(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """The kernels of each call; compiled by a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    options = ["--ampere"] if request.param == "--ampere" else []
    command = [sys.executable, "-m", "tests.support.kernels.compile_for_hopper", *options, *NAMES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def count(operations: list[str], *beginnings: str) -> int:
    return sum(operation.startswith(beginnings) for operation in operations)


def test_no_kernel_spills_registers(shipped: dict[str, list[dict[str, Any]]]):
    kernels = [(name, kernel) for name, found in shipped.items() for kernel in found]
    assert len(kernels) > len(NAMES)
    assert not [(name, kernel["name"]) for name, kernel in kernels if kernel["stack"]]


def test_products_run_on_tensor_cores_beside_asynchronous_loads(
    shipped: dict[str, list[dict[str, Any]]],
):
    for name, found in shipped.items():
        for kernel in found:
            if kernel["name"] in ("_route", "_fused_router", "_align", "_sum_pairs"):
                continue
            hot = kernel["hot"]
            assert count(hot, "HGMMA", "HMMA") >= 4 and count(hot, "LDGSTS") >= 2, name
            assert not count(hot, "LDL", "STL"), name


def test_a_token_and_a_layer_are_at_most_three_launches(
    shipped: dict[str, list[dict[str, Any]]],
):
    for name, found in shipped.items():
        launches = [kernel["name"] for kernel in found]
        if " at 8," in name:
            assert launches == ["_few_gate_up", "_few_down"]
        elif name.startswith("experts"):
            assert launches == ["_align", "_grouped_gate_up", "_grouped_down"]


def test_all_ranks_run_one_router(shipped: dict[str, list[dict[str, Any]]]):
    for name in ("router", "fused router"):
        [first], [other] = shipped[f"{name} of the first rank"], shipped[f"{name} of a rank"]
        assert first["digest"] == other["digest"]


def test_a_fused_router_asks_for_its_weights_before_it_waits(
    shipped: dict[str, list[dict[str, Any]]],
):
    for name in ("fused router qwen3", "fused router qwen3.5", "fused router gpt-oss"):
        [kernel] = shipped[name]
        operations = kernel["operations"]
        if "ACQBULK" not in operations:  # before Hopper no kernel starts early
            continue
        before, after = (
            count(part, "LDG.E.128")
            for wait in [operations.index("ACQBULK")]
            for part in (operations[:wait], operations[wait:])
        )
        assert before >= 12 and after <= before


def test_of_a_rank_that_has_some_experts_they_are_four_at_most(
    shipped: dict[str, list[dict[str, Any]]],
):
    for name in ("some experts", "some experts, one,"):
        few, many = ([k["name"] for k in shipped[f"{name} at {tokens}"]] for tokens in (8, 32))
        assert few == ["_few_gate_up", "_few_down"]
        assert many == ["_align", "_grouped_gate_up", "_grouped_down", "_sum_pairs"]


def test_batch_invariant_products_use_one_kind_of_instruction(
    shipped: dict[str, list[dict[str, Any]]],
):
    """Others may round differently, and rows of all numbers must meet the same."""
    used = {
        tuple(sorted({o.split(".")[0] for o in kernel["hot"] if o.startswith(("HGMMA", "HMMA"))}))
        for name, found in shipped.items()
        if name.startswith("experts invariant")
        for kernel in found[1:]
    }
    assert len(used) == 1 and len(next(iter(used))) == 1
