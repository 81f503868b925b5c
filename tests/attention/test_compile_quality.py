"""What the compiler makes of the shipped kernels for an H100; no GPU is needed.

Limits are the figures of Triton 3.6 and 3.7 with some room: a change that exceeds one costs speed
and is to be looked at, not waved through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from attention.decode.decode import decode_config
from attention.prefill.prefill_hopper import hopper_config
from tests.support.paths import ROOT

FP8 = torch.float8_e4m3fn
NAMES = ("d128 bf16", "d64 bf16", "d128 fp8")

# Minutes where Triton has not yet compiled the kernels and kept them.
pytestmark = [pytest.mark.compiled, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def shipped() -> dict[str, dict[str, Any]]:
    """Each kernel of each shipped call, by `call: kernel`; compiled by a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.compile_for_hopper"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        f"{call}: {kernel['name']}": kernel
        for call, kernels in json.loads(done.stdout).items()
        for kernel in kernels
    }


def count(operations: list[str], *beginnings: str) -> int:
    return sum(operation.startswith(beginnings) for operation in operations)


def test_loops_that_multiply_leave_spilled_registers_alone(shipped: dict[str, dict[str, Any]]):
    """But for two loads in the Hopper kernel, whose consumers have 240 registers and no more."""
    multiplying = [name for name, kernel in shipped.items() if kernel["hot"]]
    assert len(multiplying) >= 2 * len(NAMES), "decode and prefill have such loops"
    for name in multiplying:
        spills = count(shipped[name]["hot"], "LDL", "STL")
        assert spills <= (2 if name.startswith("prefill_hopper") else 0), f"{name}: {spills}"


def test_few_registers_are_spilled_anywhere(shipped: dict[str, dict[str, Any]]):
    """In bytes of stack: outside its loops the prefill kernel keeps some of what it needs there."""
    stacks = {name: kernel["stack"] for name, kernel in shipped.items()}
    limits = {"prefill": 192, "prefill_hopper": 16, "decode": 16, "flash1": 16, "sample": 16}
    limits["batch_invariant"] = 224  # spilled between KV splits
    limits["all_reduce_two_norms_quantize"] = 32  # so that two programs are resident
    limits["embed"] = 32  # of the reduction of large angles, which few rotations need
    assert all(stack <= limits.get(name.split()[0], 0) for name, stack in stacks.items()), stacks


@pytest.mark.parametrize("name", NAMES)
def test_decode_loads_wide_and_multiplies_on_tensor_cores(
    shipped: dict[str, dict[str, Any]], name: str
):
    kernel = shipped[f"decode {name}: _decode"]
    loads = Counter(operation for operation in kernel["hot"] if operation.startswith("LDGSTS"))
    wide = sum(number for load, number in loads.items() if load.endswith("128"))
    assert wide >= 8 if "bf16" in name else any(load.endswith(("64", "128")) for load in loads)
    assert count(kernel["hot"], "HMMA") >= 8 and count(kernel["hot"], "LDSM")


@pytest.mark.parametrize("name", NAMES)
def test_as_many_decode_programs_fit_an_sm_as_its_configuration_says(
    shipped: dict[str, dict[str, Any]], name: str
):
    config = decode_config(
        int(name.split()[0][1:]), torch.bfloat16, queries=4, kv_dtype=FP8 if "fp8" in name else None
    )
    assert shipped[f"decode {name}: _decode"]["resident"] >= config.ctas_per_sm


@pytest.mark.parametrize("name", NAMES)
def test_the_hopper_decode_kernel_loads_by_tma_and_leaves_room(
    shipped: dict[str, dict[str, Any]], name: str
):
    """For a combine program, which so can wait beside it on the SM."""
    kernel = shipped[f"decode_hopper {name}: _decode_hopper"]
    assert count(kernel["operations"], "UTMALDG") and not count(kernel["operations"], "LDL", "STL")
    assert count(kernel["hot"], "HMMA") >= 8 and count(kernel["hot"], "LDSM")
    assert kernel["resident"] >= 2


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_one_token_a_row_runs_the_kernel_compiled_for_one(
    shipped: dict[str, dict[str, Any]], name: str
):
    """Whatever rows of several tokens need: not a bit of it may differ."""
    kernels = [shipped[f"{call} {name}: _decode_hopper"] for call in ("decode_hopper", "flash2")]
    assert kernels[0]["digest"] == kernels[1]["digest"]
    several = shipped[f"decode_hopper {name}, 4 tokens of 4: _decode_hopper"]
    assert several["digest"] != kernels[0]["digest"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_several_tokens_take_no_more_of_an_sm_until_they_need_a_larger_tile(
    shipped: dict[str, dict[str, Any]], name: str
):
    one = shipped[f"decode_hopper {name}: _decode_hopper"]
    four = shipped[f"decode_hopper {name}, 4 tokens of 4: _decode_hopper"]
    for what in ("registers", "shared", "resident", "stack"):
        assert four[what] == one[what]
    assert count(four["hot"], "HMMA") == count(one["hot"], "HMMA")


def test_the_hopper_decode_kernel_converts_float8_on_its_way_from_shared_memory(
    shipped: dict[str, dict[str, Any]],
):
    """Two numbers an instruction, and K and V both by ldmatrix: 128 keys and values of 128 numbers
    are 256 numbers a thread, and no thread writes any of them back."""
    hot = shipped["decode_hopper d128 fp8: _decode_hopper"]["hot"]
    conversions = sum(operation.startswith("F2FP.F16.E4M3") for operation in hot)
    assert conversions == 128 and count(hot, "LDSM") == 16, (conversions, count(hot, "LDSM"))
    assert count(hot, "STS") <= 12, "the weights, and maxima of the warps"


@pytest.mark.parametrize("name", NAMES)
def test_prefill_keeps_the_tensor_cores_fed(shipped: dict[str, dict[str, Any]], name: str):
    """Asynchronous products, and more of them than waits: otherwise each is waited for."""
    hot = shipped[f"prefill {name}: _prefill"]["hot"]
    gemms, waits = count(hot, "HGMMA"), count(hot, "WARPGROUP.DEPBAR")
    assert gemms >= 8 and waits <= gemms / 4, (gemms, waits)
    assert any(operation.startswith("LDGSTS") and "128" in operation for operation in hot)


@pytest.mark.parametrize("name", [*NAMES, "d256 bf16", "d256 fp8"])
def test_the_hopper_kernel_waits_for_several_products_at_once(
    shipped: dict[str, dict[str, Any]], name: str
):
    """Where the compiler cannot follow products in flight it waits for each of them."""
    kernel = shipped[f"prefill_hopper {name}: _prefill_hopper"]
    gemms, waits = (count(kernel["hot"], x) for x in ("HGMMA", "WARPGROUP.DEPBAR"))
    assert gemms >= 32 and waits <= gemms / 4, (gemms, waits)
    assert count(kernel["operations"], "UTMALDG"), "K and V come by TMA"
    assert count(kernel["operations"], "USETMAXREG"), "the loading warp gives its registers away"


@pytest.mark.parametrize("name", ["d64 bf16", "d72 bf16", "d80 bf16", "d72 bf16 of three"])
def test_attention_of_encoders_keeps_products_in_flight_and_spills_nothing(
    shipped: dict[str, dict[str, Any]], name: str
):
    kernel = shipped[f"varlen_hopper {name}: _varlen_hopper"]
    gemms, waits = (count(kernel["hot"], x) for x in ("HGMMA", "WARPGROUP.DEPBAR"))
    assert gemms >= 32 and waits <= gemms / 4, (gemms, waits)
    assert not count(kernel["operations"], "LDL", "STL") and kernel["stack"] == 0
    assert count(kernel["operations"], "UTMALDG") and count(kernel["operations"], "USETMAXREG")


def test_every_product_reads_its_matrices_from_where_the_program_has_them(
    shipped: dict[str, dict[str, Any]],
):
    assert {name: kernel["stray"] for name, kernel in shipped.items() if kernel["stray"]} == {}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_hopper_prefill_kernel_has_stages_of_two_blocks(head_dim: int, kv_dtype: torch.dtype):
    """Of K and of V, so that the next block is loaded while one is multiplied."""
    assert hopper_config(head_dim, kv_dtype).stages >= 2


@pytest.mark.parametrize("name", ["d128 fp8", "d256 fp8"])
def test_the_hopper_prefill_kernel_converts_two_float8_numbers_an_instruction(
    shipped: dict[str, dict[str, Any]], name: str
):
    """Widely: eight bytes are read and sixteen written at a time."""
    operations = shipped[f"prefill_hopper {name}: _prefill_hopper"]["operations"]
    conversions = [n for n, x in enumerate(operations) if x.startswith("F2FP.F16.E4M3")]
    block = operations[conversions[0] - 8 : conversions[-1] + 8]
    assert len(conversions) == 256
    assert count(block, "LDS.64") >= 60 and count(block, "STS.128") >= 60


def test_products_ask_for_weights_without_a_wait_and_multiply_on_tensor_cores(
    shipped: dict[str, dict[str, Any]],
):
    """The warp that loads weights never waits; the one that loads x does, and those that read
    the squares of a norm."""
    gemms = [kernel for name, kernel in shipped.items() if name.endswith(": _skinny_gemm")]
    assert len(gemms) >= 4, "one for each number of rows at least"
    for kernel in gemms:
        operations = kernel["operations"]
        first = {x: operations.index(x) for x in ("PREEXIT", "UTMALDG.2D", "ACQBULK")}
        assert first["PREEXIT"] < first["UTMALDG.2D"] < first["ACQBULK"], first
        assert count(operations, "ACQBULK") == 2
        assert count(operations[first["ACQBULK"] :], "UTMALDG.2D") >= 1
        assert count(kernel["hot"], "HGMMA") >= 8 and kernel["resident"] >= 1


@pytest.mark.parametrize("name", [*NAMES, "16", "128", "512", "4096"])
def test_batch_invariant_kernels_multiply_by_one_kind_of_instruction(
    shipped: dict[str, dict[str, Any]], name: str
):
    """Others may round differently, and rows of all numbers must meet the same."""
    full = (
        f"batch_invariant {name}: _batch_invariant"
        if name in NAMES
        else f"batch_invariant_gemm at {name}: _batch_invariant_gemm"
    )
    operations = shipped[full]["operations"]
    assert count(operations, "HGMMA") >= 4 and not count(operations, "HMMA")


@pytest.mark.parametrize("name", ["swiglu bf16", "swiglu fp16"])
def test_gated_products_ask_for_weights_before_they_wait_and_keep_the_tensor_cores_busy(
    shipped: dict[str, dict[str, Any]], name: str
):
    """A stage's four instructions follow each other, and those of the next stage follow them before
    any is waited for; each consumer waits once a stage, and for all at the end of a tile."""
    kernel = shipped[f"{name}: swiglu_gemm_hopper"]
    operations, hot = kernel["operations"], kernel["hot"]
    first = {x: operations.index(x) for x in ("UTMALDG.2D", "PREEXIT", "ACQBULK")}
    assert first["UTMALDG.2D"] < first["PREEXIT"] < first["ACQBULK"], first
    assert count(operations, "HGMMA") == count(hot, "HGMMA") == 8
    assert count(operations, "WARPGROUP.DEPBAR") == 4 and count(operations, "WARPGROUP.ARRIVE") == 2
    assert not count(operations, "LDL", "STL")
    assert count(operations, "UTMASTG") == 2 and count(operations, "USETMAXREG")
    assert count(operations, "MUFU.EX2", "MUFU.RCP") <= 2 * 2 * 64 + 8, "no divisions"


def check_sending(kernel: dict[str, Any]) -> None:
    operations, hot = kernel["operations"], kernel["hot"]
    first = {x: operations.index(x) for x in ("UTMALDG.2D", "PREEXIT", "ACQBULK")}
    assert first["UTMALDG.2D"] < first["PREEXIT"] < first["ACQBULK"], first
    assert count(operations, "HGMMA") == count(hot, "HGMMA") == 8
    assert count(operations, "WARPGROUP.DEPBAR") == 4 and count(operations, "WARPGROUP.ARRIVE") == 2
    assert not count(operations, "LDL", "STL") and not kernel["stack"]
    assert count(operations, "USETMAXREG") and count(operations, "HADD2", "HFMA2") <= 2 * 64 + 4
    assert kernel["resident"] == 1 and kernel["registers"] == 168


@pytest.mark.parametrize(
    ("name", "outs"), [("1 bf16", 1), ("2 bf16", 2), ("2 fp16", 2), ("8 bf16", 8)]
)
def test_products_that_are_stored_at_once_multiply_like_gated_ones(
    shipped: dict[str, dict[str, Any]], name: str, outs: int
):
    """Each consumer stores its rows once an output, and adds 0.0 to two numbers at a time."""
    kernel = shipped[f"sending at once to {name}: sending_gemm_hopper"]
    check_sending(kernel)
    assert count(kernel["operations"], "UTMASTG") == 2 * outs


@pytest.mark.parametrize(
    ("name", "outs"),
    [
        ("1 bf16", 1),
        ("2 bf16", 2),
        ("2 bf16 in large pieces", 2),
        ("2 fp16", 2),
        ("8 bf16", 8),
    ],
)
def test_products_that_are_stored_in_pieces_multiply_like_gated_ones(
    shipped: dict[str, dict[str, Any]], name: str, outs: int
):
    """The store warp stores a piece while the next tile is multiplied, and one or eight of the last
    tile at a time: it has few registers."""
    kernel = shipped[f"sending to {name}: sending_gemm_hopper"]
    check_sending(kernel)
    assert count(kernel["operations"], "UTMASTG") in (2 * outs, (1 + 8) * outs)


@pytest.mark.parametrize("name", ["planner: plan_stream_k", "tiler: plan_tiles"])
def test_planners_are_short(shipped: dict[str, dict[str, Any]], name: str):
    """About a microsecond: they run before every step."""
    assert len(shipped[name]["operations"]) <= 1700 and shipped[name]["registers"] <= 128


def test_planners_let_no_kernel_start_before_they_end(shipped: dict[str, dict[str, Any]]):
    """What comes after reads their plan before it waits: attention/common/dependent_launch.py."""
    starting = [name for name, kernel in shipped.items() if count(kernel["operations"], "PREEXIT")]
    assert not [name for name in starting if name.startswith(("planner", "tiler"))]
    assert any(name.startswith("decode") for name in starting)


def test_lanes_that_combine_sums_round_alike(shipped: dict[str, dict[str, Any]]):
    """A product fused into a sum over lanes is not rounded in its own lane, but in the others."""
    combines = [kernel for name, kernel in shipped.items() if name.endswith("_combine")]
    # The logarithm has its own, FFMA.FTZ.
    assert combines and not any("FFMA" in kernel["operations"] for kernel in combines)


@pytest.mark.parametrize("name", NAMES[:2])
def test_keys_and_values_are_written_wide(shipped: dict[str, dict[str, Any]], name: str):
    operations = shipped[f"write_kv {name}: _write_kv"]["operations"]
    for access in ("LDG", "STG"):
        assert any(x.startswith(access) and x.endswith("128") for x in operations), operations


# Call: its kernel, bits that a thread moves at once, and how many accesses are of single numbers:
# slots; ids, angles and their table.
LAYERS = {
    "qk_norm_rope_write d128 bf16": ("_qk_norm_rope_write", "128", 1),
    "qk_norm_rope_write d64 bf16": ("_qk_norm_rope_write", "128", 1),
    "qk_norm_rope_write half rotated": ("_qk_norm_rope_write", "128", 1),
    "qk_norm_rope_write gated": ("_qk_norm_rope_write", "128", 1),
    "sigmoid_mul": ("_sigmoid_mul", "128", 0),
    "add_norm": ("_add_rms_norm", "128", 0),
    "norm": ("_add_rms_norm", "128", 0),
    "norms_around_sum": ("_add_rms_norm", "128", 0),
    "silu_mul": ("_silu_mul", "64", 0),
    "gelu_tanh_mul": ("_silu_mul", "64", 0),
    "embed": ("_embed", "128", 7),
    "embed scaled": ("_embed", "128", 12),
}


@pytest.mark.parametrize("tokens", [1, 2048])
@pytest.mark.parametrize("call", LAYERS)
def test_kernels_of_layers_access_memory_widely_and_leave_room(
    shipped: dict[str, dict[str, Any]], call: str, tokens: int
):
    name, bits, single = LAYERS[call]
    kernel = shipped[f"{call} at {tokens}: {name}"]
    accesses = Counter(x for x in kernel["operations"] if x.startswith(("LDG", "STG")))
    wide = sum(number for access, number in accesses.items() if access.endswith(bits))
    assert wide >= 3 and accesses.total() - wide <= single, accesses
    limit = 72 if call == "embed scaled" else 64
    assert kernel["registers"] <= limit and kernel["shared"] <= 1024


@pytest.mark.parametrize("call", [call for call in LAYERS if not call.endswith("_mul")])
def test_kernels_of_layers_read_weights_before_they_wait(
    shipped: dict[str, dict[str, Any]], call: str
):
    """And nothing else: the kernels before may still run."""
    operations = shipped[f"{call} at 1: {LAYERS[call][0]}"]["operations"]
    assert 1 <= count(operations[: operations.index("ACQBULK")], "LDG") <= 4
