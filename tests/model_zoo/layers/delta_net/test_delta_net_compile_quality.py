"""What the compiler makes of the gated delta net's kernels for H100; no GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from model_zoo.layers.delta_net.decode.kernel import RESIDENT
from tests.support.delta_net.shipped_delta_net import DELTA_NET, HOPPER_DELTA_NET
from tests.support.paths import ROOT

# Minutes where Triton has not yet compiled the kernels and kept them.
pytestmark = [pytest.mark.compiled, pytest.mark.timeout(1200)]

DECODE = [name for name in DELTA_NET if name.startswith("delta_net_decode")]
ONE_TOKEN = [name for name in DELTA_NET if name.startswith("decode_one_token")]
PROMPTS = [name for name in DELTA_NET if name.startswith("delta_net_prompts")]
FULL_SIZE = [name for name in PROMPTS if " of " not in name]  # heads of 128
IN_FP32 = "delta_net_prompts in fp32"  # emulates its products, and spills
SOME_REGISTERS = 32  # bytes of a thread
Shipped = dict[str, dict[str, dict[str, Any]]]  # of each call, its kernels by name


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    """Compiled by a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    names = [*DELTA_NET, *HOPPER_DELTA_NET]
    command = [sys.executable, "-m", "tests.support.kernels.compile_for_hopper", *names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    return {name: {kernel["name"]: kernel for kernel in found[name]} for name in names}


def count(operations: list[str], *beginnings: str) -> int:
    return sum(operation.startswith(beginnings) for operation in operations)


def test_no_kernel_of_16_bits_spills_more_than_some_registers(shipped: Shipped):
    spilling = [
        (name, kernel["name"])
        for name, kernels in shipped.items()
        for kernel in kernels.values()
        if kernel["stack"] > SOME_REGISTERS and name in DECODE + FULL_SIZE and name != IN_FP32
    ]
    assert spilling == []


def test_no_product_reads_a_matrix_from_where_none_is(shipped: Shipped):
    stray = [
        (name, kernel["name"], kernel["stray"])
        for name, kernels in shipped.items()
        for kernel in kernels.values()
        if kernel["stray"]
    ]
    assert stray == []


def test_no_loop_loses_where_a_loop_within_it_begins(shipped: Shipped):
    lost = [
        (name, kernel["name"], kernel["lost"])
        for name, kernels in shipped.items()
        for kernel in kernels.values()
        if kernel["lost"]
    ]
    assert lost == []


def test_rows_of_few_tokens_are_one_launch_and_read_their_state_in_large_loads(shipped: Shipped):
    for name in DECODE:
        (kernel,) = shipped[name].values()
        # A state is 64 KB, or 32, by 128 threads of 16 bytes a load.
        loads = 16 if "bf16" in name else 32
        assert count(kernel["operations"], "LDG.E.EL.128") >= loads  # EL: evicted last
        assert count(kernel["operations"], "STG.E.128") >= loads
        assert kernel["resident"] >= (2 if "bf16" in name else RESIDENT), "less is in flight"


def test_rows_of_one_token_keep_their_state_in_registers(shipped: Shipped):
    assert len(ONE_TOKEN) == 4
    for name in ONE_TOKEN:
        (kernel,) = shipped[name].values()
        assert kernel["stack"] == 0
        # A state is 64 KB, or 32, by 256 threads of 16 bytes a load; two sums of 16 values over
        # 32 lanes are 160 exchanges, and all vectors take few more.
        loads = 8 if "bf16" in name else 16
        assert count(kernel["operations"], "LDG.E.128") >= loads
        assert count(kernel["operations"], "STG.E.128") >= loads
        assert count(kernel["operations"], "SHFL") <= 200


def test_prompts_are_four_launches_and_a_plan(shipped: Shipped):
    expected = ["_plan_chunks", "_prompt_inputs", "_chunk_local", "_chunk_scan", "_gated_norm"]
    for name in PROMPTS:
        assert list(shipped[name]) == expected


def test_a_scan_multiplies_on_tensor_cores_while_the_next_chunk_is_copied(shipped: Shipped):
    for name in FULL_SIZE:
        if name != IN_FP32:
            hot = shipped[name]["_chunk_scan"]["hot"]
            assert count(hot, "HGMMA") >= 16 and count(hot, "LDGSTS") >= 8


def test_programs_of_chunks_share_a_multiprocessor(shipped: Shipped):
    for name in FULL_SIZE:
        if name != IN_FP32:
            kernels = shipped[name]
            assert count(kernels["_chunk_local"]["operations"], "HGMMA") >= 16
            assert all(kernels[one]["resident"] >= 2 for one in ("_chunk_local", "_prompt_inputs"))


def test_hopper_has_kernels_of_its_own_for_two_of_the_launches(shipped: Shipped):
    launches = ["_plan_chunks", "_prompt_inputs", "_local", "_scan", "_gated_norm"]
    for name in HOPPER_DELTA_NET:
        assert list(shipped[name]) == launches


def test_a_scan_on_hopper_transposes_on_its_way_from_and_to_shared_memory(shipped: Shipped):
    """28 products a chunk."""
    for name in HOPPER_DELTA_NET:
        operations, hot = (shipped[name]["_scan"][which] for which in ("operations", "hot"))
        assert count(operations, "HGMMA") == 28 == count(hot, "HGMMA")
        assert count(operations, "LDSM.16.MT88.4") >= 4
        assert count(operations, "STSM.16.MT88.4") >= 4
        assert shipped[name]["_local"]["resident"] >= 3
        assert shipped[name]["_local"]["stack"] <= 4 * SOME_REGISTERS  # of four heads a key
