"""Which back end and which kernels a device, a type and a shape come to: the table."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from attention.backend import BackendChoice, Capacity, Shape, UnsupportedAttention
from attention.dispatch import DECODE, FLASH1, PREFILL, Machine, choose, dispatch
from attention.planned_kernel import decode_kernel

FP8 = torch.float8_e4m3fn
CPU = Machine(None)
INTERPRETER = Machine(None, interpreted=True)
TURING, AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER = (
    Machine(capability) for capability in [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)]
)
SHAPE = Shape(
    heads=32, kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16, kv_dtype=torch.bfloat16
)
MHA = BackendChoice("mha")
ON_HOPPER = BackendChoice("flash2", "decode_hopper", "prefill_hopper", "stream-k")
PLAIN = BackendChoice("flash2", "decode", "prefill", "stream-k")
EVERYTHING = [CPU, INTERPRETER, TURING, AMPERE, ADA, HOPPER, BLACKWELL, CONSUMER]


@pytest.mark.parametrize("machine", EVERYTHING)
def test_mha_runs_everywhere_and_serves_everything(machine: Machine):
    odd = Shape(heads=96, kv_heads=1, head_dim=512, page_size=4, dtype=torch.float64, kv_dtype=FP8)
    assert dispatch(machine, "mha", SHAPE) == dispatch(machine, "mha", odd) == MHA


@pytest.mark.parametrize(
    ("machine", "choice"),
    [
        (CPU, MHA),
        (INTERPRETER, MHA),  # the interpreter has to be asked for
        (AMPERE, PLAIN),
        (ADA, PLAIN),
        (HOPPER, ON_HOPPER),
        (BLACKWELL, PLAIN),
        (CONSUMER, PLAIN),
    ],
)
def test_auto_is_flash2_where_there_is_a_gpu_for_it(machine: Machine, choice: BackendChoice):
    assert dispatch(machine, "auto", SHAPE) == choice


@pytest.mark.parametrize(
    ("machine", "changes", "reason"),
    [
        (TURING, {}, "capability 8.0 or more, this device has 7.5"),
        (AMPERE, {"kv_dtype": FP8}, "float8 pages need compute capability 8.9"),
        (HOPPER, {"head_dim": 512}, "head_dim is 512"),
        (HOPPER, {"head_dim": 8}, "head_dim is 8"),
        (HOPPER, {"page_size": 8}, "pages of 8 tokens"),
        (HOPPER, {"heads": 8 * 65}, "65 query heads share a KV head"),
        (HOPPER, {"dtype": torch.float64, "kv_dtype": torch.float64}, "torch.float64"),
        (HOPPER, {"kv_dtype": torch.float16}, "torch.bfloat16 with pages of torch.float16"),
        (replace(HOPPER, triton=False), {}, "Triton is not installed"),
    ],
)
def test_what_flash2_does_not_serve_auto_leaves_to_mha_and_says_why(machine, changes, reason):
    shape = replace(SHAPE, **changes)
    choice = dispatch(machine, "auto", shape)
    assert choice.backend == "mha" and reason in choice.reason
    with pytest.raises(
        UnsupportedAttention, match=f"--attention flash2: .*{reason}.*--attention mha"
    ):
        dispatch(machine, "flash2", shape)


def test_a_device_that_is_too_new_is_told_which_ones_are_served():
    message = (
        r"--attention batch-invariant: it needs compute capability 8\.0 or more and below 10\.0, "
        r"this device has 10\.0: use --attention mha or auto"
    )
    with pytest.raises(UnsupportedAttention, match=message):
        dispatch(BLACKWELL, "batch-invariant", SHAPE)


@pytest.mark.parametrize("name", ["flash1", "flash2"])
def test_kernels_run_on_a_cpu_only_in_the_interpreter(name: str):
    with pytest.raises(UnsupportedAttention, match=f"--attention {name}.*CUDA.*TRITON_INTERPRET=1"):
        dispatch(CPU, name, SHAPE)
    assert dispatch(INTERPRETER, name, SHAPE).backend == name
    with pytest.raises(UnsupportedAttention, match="Triton is not installed"):
        dispatch(replace(INTERPRETER, triton=False), name, SHAPE)


@pytest.mark.parametrize("machine", [ADA, HOPPER, BLACKWELL])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("fp8", [False, True])
def test_everything_promised_has_kernels(machine: Machine, dtype: torch.dtype, fp8: bool):
    for head_dim, page_size, group in product(
        (16, 64, 80, 96, 128, 192, 256), (16, 32, 64, 128), (1, 3, 8, 64)
    ):
        shape = Shape(
            heads=group * 2, kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype,
            kv_dtype=FP8 if fp8 else dtype,
        )  # fmt: skip
        assert dispatch(machine, "flash2", shape).backend == "flash2"
        assert dispatch(machine, "flash1", shape) == BackendChoice("flash1", "flash1", "flash1")


@pytest.mark.parametrize(
    ("machine", "changes", "prefill"),
    [
        (HOPPER, {}, "prefill_hopper"),
        (HOPPER, {"dtype": torch.float16, "kv_dtype": torch.float16}, "prefill_hopper"),
        (HOPPER, {"heads": 8 * 64, "page_size": 128}, "prefill_hopper"),
        (HOPPER, {"heads": 8 * 7, "page_size": 32}, "prefill_hopper"),
        (HOPPER, {"head_dim": 24}, "prefill_hopper"),
        (HOPPER, {"head_dim": 80, "page_size": 64}, "prefill_hopper"),
        (HOPPER, {"head_dim": 16}, "prefill"),
        (HOPPER, {"head_dim": 20}, "prefill"),  # rows of 40 bytes: a TMA copies multiples of 16
        (HOPPER, {"head_dim": 136}, "prefill_hopper"),
        (HOPPER, {"head_dim": 256, "page_size": 128}, "prefill_hopper"),
        (HOPPER, {"head_dim": 252}, "prefill"),
        (HOPPER, {"kv_dtype": FP8}, "prefill_hopper"),
        (HOPPER, {"kv_dtype": FP8, "head_dim": 256}, "prefill_hopper"),
        (HOPPER, {"kv_dtype": FP8, "head_dim": 80}, "prefill_hopper"),
        (HOPPER, {"kv_dtype": FP8, "head_dim": 72}, "prefill"),  # 72 bytes: no TMA
        (ADA, {"kv_dtype": FP8}, "prefill"),
        (HOPPER, {"dtype": torch.float32, "kv_dtype": torch.float32}, "prefill"),
        (AMPERE, {}, "prefill"),
        (ADA, {}, "prefill"),
        (BLACKWELL, {}, "prefill"),
        (CONSUMER, {}, "prefill"),
        (INTERPRETER, {}, "prefill"),
    ],
)
def test_the_hopper_prefill_kernel_is_taken_for_what_it_serves(machine, changes, prefill):
    assert dispatch(machine, "flash2", replace(SHAPE, **changes)).prefill == prefill


@pytest.mark.parametrize(
    ("machine", "changes", "planner", "decode"),
    [
        (HOPPER, {}, "auto", "decode_hopper"),
        (HOPPER, {"head_dim": 256, "page_size": 128}, "stream-k", "decode_hopper"),
        (HOPPER, {}, "fa3", "decode"),  # whose pieces lie in a queue
        (HOPPER, {}, "greedy", "decode"),
        (HOPPER, {"kv_dtype": FP8}, "auto", "decode_hopper"),
        (HOPPER, {"kv_dtype": FP8, "head_dim": 80}, "auto", "decode_hopper"),
        (HOPPER, {"kv_dtype": FP8, "head_dim": 72}, "auto", "decode"),  # 72 bytes: no TMA
        (HOPPER, {"kv_dtype": FP8}, "fa3", "decode"),
        (ADA, {"kv_dtype": FP8}, "auto", "decode"),
        (HOPPER, {"dtype": torch.float32, "kv_dtype": torch.float32}, "auto", "decode"),
        (HOPPER, {"heads": 8 * 33}, "auto", "decode"),
        (HOPPER, {"head_dim": 100}, "auto", "decode"),
        (BLACKWELL, {}, "auto", "decode"),
        (AMPERE, {}, "auto", "decode"),
    ],
)
def test_the_hopper_decode_kernel_is_taken_for_what_it_serves(machine, changes, planner, decode):
    assert dispatch(machine, "flash2", replace(SHAPE, **changes), planner).decode == decode


@pytest.mark.parametrize(
    ("changes", "rows", "programs"),
    [
        ({}, 8, 2),
        ({}, 7, 1),
        ({"heads": 8, "kv_heads": 1}, 256, 1),
        ({"head_dim": 256}, 256, 1),  # one takes most of an SM's registers
        ({"kv_dtype": FP8}, 256, 2),
    ],
)
def test_several_rows_get_two_programs_an_sm_where_they_fit(changes, rows, programs):
    kernel = decode_kernel("decode_hopper", replace(SHAPE, **changes), 1)
    assert kernel.step_ctas_per_sm(rows) == programs
    assert programs in kernel.grids


@pytest.mark.parametrize("kernels", [FLASH1, DECODE, PREFILL])
def test_the_last_kernel_of_each_list_is_the_most_general(kernels):
    last = kernels[-1]
    for kernel in kernels:
        assert set(kernel.dtypes) <= set(last.dtypes)
        assert set(kernel.head_dims) <= set(last.head_dims)
        assert set(kernel.page_sizes) <= set(last.page_sizes)
        assert kernel.since >= last.since and kernel.before <= last.before
        assert kernel.largest_group <= last.largest_group and last.interpretable


def test_a_split_planner_belongs_to_flash2():
    assert dispatch(HOPPER, "auto", SHAPE, "greedy").planner == "greedy"
    for machine, name, backend in [
        (CPU, "auto", "mha"),
        (HOPPER, "mha", "mha"),
        (TURING, "auto", "mha"),
        (HOPPER, "flash1", "flash1"),
    ]:
        with pytest.raises(UnsupportedAttention, match=rf"--split-planner fa3 .* {backend} here"):
            dispatch(machine, name, SHAPE, "fa3")


def test_the_back_end_says_what_it_runs(device: str):
    small = Capacity(rows=4, tokens=16)
    for name, details in [
        ("mha", "in torch"),
        ("flash1", "flash1 for all rows"),
        ("flash2", "split by stream-k, prefill"),
    ]:
        backend = choose(torch.device(device), name, SHAPE, small)
        assert backend.name == name and details in backend.details
