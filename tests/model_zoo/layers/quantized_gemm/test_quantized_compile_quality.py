"""What the compiler makes of the kernels of quantized weights for an H100; no GPU is needed.

Limits are the figures of Triton 3.6 and 3.7 with some room.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from model_zoo.layers.quantized_gemm.packed_many_rows import WIDTHS
from tests.support.kernels.shipped_quantized import APART, FORMATS, QUANTIZED
from tests.support.kernels.uninterpreted import run_uninterpreted
from tests.support.paths import ROOT

# Minutes where Triton has not yet compiled the kernels and kept them.
pytestmark = [pytest.mark.compiled, pytest.mark.timeout(1200)]
# Bytes: with scales of 32 columns 64 rows need three sums of 32 registers.  A unit, 3400
# instructions, has at most 43 of these loads.
SPILLED = {"skinny int4 g32 zeros at 64": 64}
# In three programs on a multiprocessor: scales and zero points of the next unit, and addresses of
# the epilogue that adds to a residual.
SPILLED |= {"skinny int4 g32 zeros apart 64 at 8": 240, "skinny int4 g64 zeros apart 64 at 8": 112}
SPILLED |= {"skinny nvfp4 apart 64 at 8": 56, "skinny mxfp4 apart 64 at 8": 16}
# In two programs, with sums of 16 rows, and in one with sums of 32.
SPILLED |= {"skinny int4 g64 zeros apart 32 at 16": 80, "skinny int4 g32 zeros apart 32 at 32": 32}


@pytest.fixture(scope="module")
def shipped() -> dict[str, list[dict[str, Any]]]:
    """The kernels of each call; compiled by a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.kernels.compile_for_hopper", *QUANTIZED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_kernels_of_activations_serve_any_number_of_rows():
    """The start compiles them for some numbers of rows; the interpreter knows no others."""
    program = (
        "from model_zoo.layers.quantized_gemm import quantize_rows as module\n"
        "for name in ('quantize_rows', 'add_rms_norm_quantize', 'silu_mul_quantize'):\n"
        "    kernel = getattr(module, '_' + name)\n"
        "    print(*(param.name for param in kernel.params if param.do_not_specialize))\n"
    )
    assert run_uninterpreted(program).splitlines() == ["M rows"] * 3


def test_a_norm_that_quantizes_adds_up_squares_in_the_order_of_one_that_does_not():
    """So that its codes are those of a separate pass, to the last bit."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.support.kernels.norm_sums"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1000)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[tuple[int, int], dict[str, list[object]]] = {}
    for columns, name, layouts, arithmetic in json.loads(done.stdout):
        assert layouts and arithmetic
        of_norms = found.setdefault((columns, len(layouts)), {})
        of_norms.setdefault(name, []).append((layouts, arithmetic))
    assert len(found) == 8, "four widths, with one norm and with two"
    for both in found.values():
        (plain,) = both["plain"]
        assert both["quantizing"] == 4 * [plain], "by row, by block, and to int8"


def count(operations: list[str], *beginnings: str) -> int:
    return sum(operation.startswith(beginnings) for operation in operations)


def norms(name: str) -> bool:
    """Whether the kernel may do its part of norms: not for 64 rows, and not of fp8 activations."""
    return "skinny" in name and "codes" not in name and not name.endswith(" at 64")


def test_no_kernel_spills_registers(shipped: dict[str, list[dict[str, Any]]]):
    kernels = [(name, kernel) for name, found in shipped.items() for kernel in found]
    assert len(kernels) >= len(QUANTIZED)
    assert not [name for name, kernel in kernels if kernel["stack"] > SPILLED.get(name, 0)]


@pytest.mark.parametrize("name", FORMATS)
def test_dequantizing_writes_widely_in_few_instructions(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    """32 weights a thread; at the memory's speed an H100 has 15 instructions for each."""
    (kernel,) = shipped[f"dequantize {name}"]
    operations = kernel["operations"]
    assert count(operations, "STG.E.128") == count(operations, "STG") == 4
    assert len(operations) <= 14 * 32 and kernel["resident"] >= 8
    assert count(operations, "I2F") <= 1, "slow: of zeros, not of weights"


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_quantized_weights_run_on_tensor_cores_beside_asynchronous_loads(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    (kernel,) = shipped[f"dequant_gemm {name}"]
    hot = kernel["hot"]
    assert count(hot, "HGMMA", "HMMA") >= 8 and count(hot, "LDGSTS") >= 4
    assert not count(hot, "LDL", "STL") and kernel["resident"] >= 2
    assert count(hot, "I2F") <= 8, "slow: of zeros, not of the 64 weights of a thread"


@pytest.mark.parametrize("rows", [16, 128, 4096])
def test_batch_invariant_products_use_one_kind_of_instruction(
    shipped: dict[str, list[dict[str, Any]]], rows: int
):
    """Others may round differently, and rows of all numbers must meet the same."""
    (kernel,) = shipped[f"batch_invariant_dequant at {rows}"]
    assert count(kernel["operations"], "HGMMA") >= 8 and not count(kernel["operations"], "HMMA")


@pytest.mark.parametrize("kind", ["row", "block"])
def test_quantized_rows_are_read_and_written_widely(
    shipped: dict[str, list[dict[str, Any]]], kind: str
):
    kernels = shipped[f"quantize {kind}"]
    assert len(kernels) == 3
    for kernel in kernels:
        operations = kernel["operations"]
        assert count(operations, "LDG") == count(operations, "LDG.E.128")
        assert count(operations, "STG.E.128", "STG.E.64") >= count(operations, "STG") - 1
        assert count(operations, "F2FP.SATFINITE.E4M3") >= 4, "two codes an instruction"


@pytest.mark.parametrize("kind", ["int8", "int8 zeros"])
def test_rows_of_int8_are_read_and_written_widely(
    shipped: dict[str, list[dict[str, Any]]], kind: str
):
    kernels = shipped[f"quantize {kind}"]
    assert len(kernels) == 3
    for kernel in kernels:
        operations = kernel["operations"]
        assert count(operations, "LDG") == count(operations, "LDG.E.128")
        few = 1 + (kind == "int8 zeros")
        assert count(operations, "STG.E.128", "STG.E.64") >= count(operations, "STG") - few
        assert count(operations, "F2I") == few - 1, "slow: an addition rounds, but the zero point"


@pytest.mark.parametrize(("rows", "stores"), [(8, 1), (64, 4), (512, 8), (4096, 16)])
def test_int8_runs_on_tensor_cores_and_writes_widely(
    shipped: dict[str, list[dict[str, Any]]], rows: int, stores: int
):
    (kernel,) = shipped[f"int8 at {rows}"]
    operations = kernel["operations"]
    assert count(operations, "IGMMA") >= 4 and not count(operations, "HGMMA", "IMMA")
    copies = "UTMALDG" if rows > 64 else "LDGSTS.E.BYPASS.128"
    assert count(operations, copies) >= 4
    assert count(operations, "STG.E.128") == stores


@pytest.mark.parametrize("name", [name for name in QUANTIZED if "skinny" in name])
def test_a_warp_waits_for_the_kernel_before_and_only_then_loads_x(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    (kernel,) = shipped[name]
    operations = kernel["operations"]
    loads = operations[operations.index("PREEXIT") :]
    assert not count(loads[: loads.index("UTMALDG.2D")], "ACQBULK"), "weights wait for nothing"
    assert count(operations[operations.index("ACQBULK") :], "UTMALDG.2D") >= 1
    groups = 2 if "fp8" in name and name.endswith("sync at 16") else 1
    waits = 1 + groups if norms(name) else 1
    assert count(operations, "ACQBULK") == waits, "warps that multiply wait for norms"


@pytest.mark.parametrize(
    "name", [name for name in QUANTIZED if name.startswith("skinny") and "apart" not in name]
)
def test_codes_go_through_registers_to_tensor_cores(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    (kernel,) = shipped[name]
    operations, hot = kernel["operations"], kernel["hot"]
    multiplied = count(operations, "HGMMA")
    if "sync" in name:
        multiplied = count(operations, "HMMA") // (2 if name.endswith("16") else 1)
        tiles = count(operations, "HMMA") // 2
        assert tiles <= count(operations, "LDSM") < tiles + 4, "four tiles of x each, and the end's"
    assert multiplied >= (8 if "four" in name else 16) and count(operations, "UTMALDG") >= 2
    weights, bits = 8 * multiplied, 8 if "fp8" in name else 4  # of a thread and unit
    words = weights * bits // 128
    assert words <= count(operations, "LDS.128") < words + 8, "each word is loaded once"
    # By the end of a tile, with a norm, and to start the warpgroups: codes would be 32 more.
    stored = 36 if "runs" in name else 24
    assert count(operations, "STS") <= stored and count(operations, "SHFL") <= stored
    converting = count(hot, "LOP3", "SHF", "PRMT", "HADD2", "HMUL2", "HFMA2")
    at_the_end = 120 if norms(name) else 0
    assert converting - at_the_end <= 2.3 * weights, (
        "at the memory's speed an SM has 3.4 for each 4-bit weight"
    )


@pytest.mark.parametrize("name", [name for name in QUANTIZED if "apart" in name])
def test_warps_with_columns_of_their_own_read_words_and_x_once(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    (kernel,) = shipped[name]
    operations, hot = kernel["operations"], kernel["hot"]
    # Of a thread and unit, 32 weights each; the end of a tile has fewer than 4.
    words = count(hot, "LDS.128") // 4 * 4
    weights, tiles_of_x = 32 * words, int(name.split()[-1]) // 8
    assert words in (4, 8, 16), "each word is loaded once"
    products = weights // 8 * max(1, tiles_of_x)
    without = "int4 g128" in name or "int4 g64" in name  # a subtraction of zero points
    of_x = products // (2 if "32 at" in name else 4) if without else 0
    assert count(operations, "HMMA") == products + of_x
    assert not without or count(operations, "HADD2") <= 8, "128 a unit, were they subtracted"
    assert count(hot, "MOV", "IMAD.MOV") <= max(70 * words // 8, 90), "halves stay together"


@pytest.mark.parametrize("name", APART)
def test_no_two_programs_of_one_tile_for_each_multiprocessor_share_one(
    shipped: dict[str, list[dict[str, Any]]], name: str
):
    (alone,), (others,) = shipped[f"one per SM {name}"], shipped[f"skinny {name} apart 32 at 8"]
    assert alone["resident"] == 1 and others["resident"] == 2
    assert alone["registers"] == others["registers"] and not count(alone["hot"], "LDL", "STL")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["int4 g128", "nvfp4", "mxfp4"])
def test_many_rows_are_multiplied_while_the_next_weights_are_converted(
    shipped: dict[str, list[dict[str, Any]]], name: str, width: int
):
    """Each stage of x is waited for once: ptxas lets every wgmma wait for the one before
    where registers of an operand may still be in use."""
    (kernel,) = shipped[f"packed many rows {name} by {width}"]
    hot = kernel["hot"]
    products = count(hot, "HGMMA")
    assert products == 2 * 256 // 16, "of two warpgroups and 256 columns"
    assert count(hot, "WARPGROUP") <= products // 2
    assert not count(hot, "LDL", "STL")
    assert not kernel["stray"] and not kernel["lost"]
