"""The Hopper decode kernel against the float64 oracle, and against the plain kernel's bits of plan.

Gluon has no interpreter: all of this needs a GPU of compute capability 9.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.common.write_kv import write_kv
from attention.decode.decode_hopper import decode_hopper, most_queries
from attention.planner.device_planner import DevicePlanner
from attention.planner.split_plan import SplitPlan, SplitPlanSpec
from tests.support.attention.attention_oracle import FP8, OracleCase, check, make_case
from tests.support.attention.decode_kernel_runner import make_plan, most, poison

BF16, FP16 = torch.bfloat16, torch.float16
OVER_FP8 = [(BF16, FP8), (FP16, FP8)]  # queries, pages
EDGES = [(1, n) for n in (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000)]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("the kernel is made for compute capability 9.0")


pytestmark = pytest.mark.gpu


def run(case: OracleCase, plan: SplitPlan) -> tuple[Tensor, Tensor]:
    out, lse = case.results()
    decode_hopper(case.inputs(out, lse), plan)
    return out, lse


def decoded(case: OracleCase, **spec: int) -> tuple[Tensor, Tensor]:
    return run(case, make_plan(case, **spec)[0])


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, BF16), (FP16, FP16), *OVER_FP8])
@pytest.mark.parametrize("programs", [1, 11, 132])
def test_rows_of_every_length_equal_dense_attention(
    dtype: torch.dtype, kv_dtype: torch.dtype, programs: int
):
    case = make_case(EDGES, dtype=dtype, kv_dtype=kv_dtype, group=4, device="cuda")
    check(case, *decoded(case, programs=programs))


@pytest.mark.parametrize(
    ("head_dim", "kv_dtype"),
    [
        *((head_dim, BF16) for head_dim in (24, 64, 80, 96, 128, 192, 256)),
        *((head_dim, FP8) for head_dim in (32, 48, 64, 80, 96, 128, 192, 256)),
    ],
)
def test_every_head_dim(head_dim: int, kv_dtype: torch.dtype):
    rows = [(2, 300), (1, 1), (1, 0)]
    case = make_case(rows, head_dim=head_dim, kv_dtype=kv_dtype, device="cuda")
    check(case, *decoded(case, max_q_len=2))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_every_group(group: int, kv_dtype: torch.dtype):
    max_q_len = 2 if group in (3, 8, 16) else 1
    rows = [(1, 200), (2, 135)]
    case = make_case(rows, group=group, head_dim=128, kv_dtype=kv_dtype, device="cuda")
    check(case, *decoded(case, max_q_len=max_q_len, programs=5), served=most(max_q_len))


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_every_page_and_block(page: int, block: int, kv_dtype: torch.dtype):
    if kv_dtype == FP8 and block < page:
        pytest.skip("its tiles are of 128 tokens, and so are its pages' copies")
    rows = [(1, page - 1), (1, page), (1, page + 1), (4, 2 * page + 3), (1, 999)]
    case = make_case(rows, page=page, kv_dtype=kv_dtype, device="cuda", seed=block)
    check(case, *decoded(case, max_q_len=4, block=block))


@pytest.mark.parametrize("max_q_len", range(1, 9))
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_rows_of_few_queries_are_served_and_others_left_untouched(
    max_q_len: int, kv_dtype: torch.dtype
):
    rows = [(1, 40), (3, 50), (0, 30), (1, 0), (8, 8), (2, 133), (9, 20), (4, 24), (6, 326)]
    case = make_case(rows, group=4, kv_dtype=kv_dtype, device="cuda")
    check(case, *decoded(case, max_q_len=max_q_len), served=most(max_q_len))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
@pytest.mark.parametrize(
    ("group", "max_q_len", "head_dim"),
    [(4, 8, 128), (8, 4, 128), (8, 8, 128), (16, 4, 128), (7, 8, 96), (16, 8, 64), (16, 2, 256)],
)
def test_tiles_of_32_to_128_rows(
    group: int, max_q_len: int, head_dim: int, kv_dtype: torch.dtype
) -> None:
    """As many rows as the kernel's largest tile has, and half of them."""
    assert 4 * group * max_q_len > most_queries(head_dim) >= group * max_q_len
    rows = [(max_q_len, 700), (1, 40), (2, 133), (max_q_len, max_q_len), (1, 0), (2, 2)]
    for page, programs in ((16, 132), (64, 3)):
        case = make_case(
            rows, group=group, head_dim=head_dim, page=page, kv_dtype=kv_dtype, sinks=page == 16,
            device="cuda",
        )  # fmt: skip
        check(case, *decoded(case, max_q_len=max_q_len, programs=programs, block=64))


@pytest.mark.parametrize("window", [1, 2, 16, 33, 127, 128, 4096])
@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_a_window_hides_what_is_before_it(window: int, kv_dtype: torch.dtype):
    rows = [(1, 700), (5, 150), (1, 1), (4, 4), (1, 0)]
    case = make_case(rows, window=window, group=1, kv_dtype=kv_dtype, device="cuda")
    check(case, *decoded(case, max_q_len=5))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_pages_before_the_window_are_never_read(kv_dtype: torch.dtype):
    case = make_case([(1, 100), (3, 290)], window=20, kv_dtype=kv_dtype, device="cuda")
    case.spoil_before_window()
    check(case, *decoded(case, max_q_len=3))


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": 21},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "float16": {"dtype": FP16},
    "fp8": {"kv_dtype": FP8},
    "NHD": {"layout": "NHD"},
    "joint": {"layout": "joint", "strided_q": True},
    "mixed": {"layout": "mixed"},
    "shared": {"shared_pages": 2},
    "large": {"q_factor": 30.0, "scale": 1.0},
    "zero": {"scale": 0.0},
}
LAYOUTS = {"NHD", "joint", "mixed"}


@pytest.mark.parametrize(
    "names",
    [
        pair
        for n in (1, 2)
        for pair in combinations(FEATURES, n)
        if len(LAYOUTS & {*pair}) < 2 and pair != ("large", "zero")
    ],
    ids="+".join,
)
def test_features_alone_and_in_pairs(names: tuple[str, ...]):
    arguments: dict[str, Any] = {}
    for name in names:
        arguments |= FEATURES[name]
    case = make_case([(1, 150), (3, 145), (1, 0), (1, 64)], device="cuda", **arguments)
    check(case, *decoded(case, max_q_len=3))


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 300.0, 1e30])
def test_queries_of_any_size_meet_float8_keys(factor: float):
    """They are multiplied as float16, which has no such numbers."""
    rows = [(1, 300), (2, 70), (1, 1)]
    case = make_case(rows, kv_dtype=FP8, q_factor=factor, scale=1 / (8 * factor), device="cuda")
    check(case, *decoded(case, max_q_len=2))


def test_every_float8_number_is_read_as_what_it_is():
    """A key of each, all else zeros: the weights show its logit, the output its value."""
    numbers = torch.arange(256, dtype=torch.uint8, device="cuda").view(FP8)
    numbers = numbers[~numbers.float().isnan()]
    case = make_case([(1, len(numbers))], kv_heads=1, kv_dtype=FP8, scale=1 / 64, device="cuda")
    for position, number in enumerate(numbers):
        page, cell = int(case.page_table[0, position // 16]), position % 16
        for pool, dense in ((case.k, case.keys[0]), (case.v, case.values[0])):
            pool[page, 0, cell] = dense[position] = 0
            pool[page, 0, cell, position % 64] = dense[position, 0, position % 64] = number
    check(case, *decoded(case))


@pytest.mark.parametrize("kv_dtype", [BF16, FP8])
def test_the_same_plan_twice_gives_the_same_bits(kv_dtype: torch.dtype):
    case = make_case([(1, 1300), (2, 770), (1, 5)], kv_dtype=kv_dtype, device="cuda")
    plan, _ = make_plan(case, max_q_len=2, programs=132)
    first = run(case, plan)
    for _ in range(20):
        poison(plan)
        for found, before in zip(run(case, plan), first, strict=True):
            assert torch.equal(found, before)


def test_many_random_batches_on_the_whole_device():
    torch.manual_seed(3)
    for seed in range(40):
        rows = [
            (int(torch.randint(1, 3, ())), int(torch.randint(2, 10 ** (2 + seed % 3), ())))
            for _ in range(1 + seed)
        ]
        case = make_case(
            rows, group=4, head_dim=128, kv_heads=1 + seed % 8, kv_dtype=(BF16, FP8)[seed % 2],
            device="cuda",
        )  # fmt: skip
        check(case, *decoded(case, max_q_len=2, programs=132, block=64 << seed % 2))


def test_a_layer_reads_what_the_kernel_before_it_wrote():
    """In a graph of layers, planned and written anew: the copies run before the kernels in front of
    them, but not where those write."""
    rows = [(1, 1 + 37 * i % 1500) for i in range(40)]
    case = make_case(rows, group=4, head_dim=128, device="cuda")
    spec = SplitPlanSpec(kv_heads=2, programs=132, block=64)
    planner = DevicePlanner(
        spec, "stream-k", max_rows=40, group=4, head_dim=128, device=torch.device("cuda")
    )
    last = case.cache_seqlens.long() - 1
    slots = case.page_table.gather(1, (last // 16)[:, None])[:, 0].long() * 16 + last % 16
    new = torch.randn(20, 2, 40, 2, 128, dtype=BF16, device="cuda")
    outs = torch.empty(20, *case.q.shape, dtype=BF16, device="cuda")

    def layers() -> None:
        plan = planner.plan(case.cu_seqlens_q, case.cache_seqlens)
        for layer in range(20):
            write_kv(new[layer, 0], new[layer, 1], case.k, case.v, slots)
            decode_hopper(case.inputs(outs[layer]), plan)

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _ in range(10):
        outs.fill_(float("nan"))
        graph.replay()
    for layer in range(20):
        for row, (_, kv_len) in enumerate(rows):
            case.keys[row][kv_len - 1], case.values[row][kv_len - 1] = new[layer, :, row]
        check(case, outs[layer])
