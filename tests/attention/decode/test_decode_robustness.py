"""The decode kernel on a GPU under load: graphs, huge pools and rows, streams, random cases."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from attention.common.kernel_inputs import KernelInputs
from attention.decode.decode import decode
from attention.planner.device_planner import DevicePlanner
from attention.planner.split_plan import SplitPlanSpec
from tests.support.attention.attention_oracle import FP8, OracleCase, check, make_case
from tests.support.attention.decode_kernel_runner import decoded, make_plan, most, run
from tests.support.attention.poisoned_kv_pool import read
from tests.support.kernels.compute_sanitizer import check_sanitized

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
PAGE, KV_HEADS, GROUP, DIM = 16, 2, 4, 128


class RobustnessStep:
    """The buffers of a captured step: as many rows and tokens as fit, whatever is in them."""

    ROWS, MAX_Q_LEN, PAGES, WIDTH = 64, 3, 4096, 300

    def __init__(self) -> None:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device="cuda")

        self.tokens = self.ROWS * self.MAX_Q_LEN
        self.q = torch.randn(self.tokens, KV_HEADS * GROUP, DIM, device="cuda").to(BF16)
        pool = 2, self.PAGES, KV_HEADS, PAGE, DIM
        self.k, self.v = torch.randn(pool, device="cuda").to(BF16)
        self.table = ints(self.ROWS, self.WIDTH)
        self.cu_seqlens_q, self.cache_seqlens = ints(self.ROWS + 1), ints(self.ROWS)
        self.out = torch.empty_like(self.q)
        self.lse = torch.empty(self.q.shape[:2], device="cuda")
        spec = SplitPlanSpec(
            kv_heads=KV_HEADS, programs=264, max_q_len=self.MAX_Q_LEN, min_blocks=1
        )
        self.planner = DevicePlanner(
            spec,
            "stream-k",
            max_rows=self.ROWS,
            group=GROUP,
            head_dim=DIM,
            device=torch.device("cuda"),
        )

    def load(self, rng: np.random.Generator) -> list[tuple[int, int]]:
        """A random batch: some rows, then padding that feeds nothing."""
        count = int(rng.integers(0, self.ROWS + 1))
        longest = int(rng.choice([1, 17, 200, self.WIDTH * PAGE]))
        q_lens = rng.integers(0, self.MAX_Q_LEN + 2, count)  # some are left to the prefill kernel
        kv_lens = rng.integers(1, longest + 1, count) * (rng.random(count) > 0.1)
        q_lens = np.minimum(q_lens, np.maximum(kv_lens, 1))
        while q_lens.sum() > self.tokens:
            q_lens[q_lens.argmax()] -= 1
        table = rng.integers(0, self.PAGES, (self.ROWS, self.WIDTH), dtype=np.int32)
        for row in range(self.ROWS):
            used = -(-int(kv_lens[row]) // PAGE) if row < count else 0
            table[row, used:] = 2**31 - 1
        padded = np.pad(
            np.cumsum(q_lens), (1, self.ROWS - count), mode="edge" if count else "constant"
        )
        padded[0] = 0
        self.table.copy_(torch.from_numpy(table))
        self.cu_seqlens_q.copy_(torch.from_numpy(padded))
        self.cache_seqlens.copy_(torch.from_numpy(np.pad(kv_lens, (0, self.ROWS - count))))
        return [(int(q), int(kv)) for q, kv in zip(q_lens, kv_lens, strict=True)]

    def run(self) -> None:
        plan = self.planner.plan(self.cu_seqlens_q, self.cache_seqlens)
        inputs = KernelInputs(
            self.q, self.k, self.v, self.table, self.out, self.lse, scale=DIM**-0.5
        )
        decode(inputs, plan)

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out.clone(), self.lse.clone()

    def poison(self) -> None:
        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))

    def case(self, rows: list[tuple[int, int]]) -> OracleCase:
        """The same step for the oracle."""
        num_tokens = sum(q_len for q_len, _ in rows)
        slots = []
        for row, (_, kv_len) in enumerate(rows):
            position = torch.arange(kv_len, device="cuda")
            slots.append(self.table[row, position // PAGE].long() * PAGE + position % PAGE)
        return OracleCase(
            rows=tuple(rows),
            q=self.q[:num_tokens],
            k=self.k,
            v=self.v,
            page_table=self.table,
            cu_seqlens_q=self.cu_seqlens_q,
            cache_seqlens=self.cache_seqlens,
            slot_mapping=torch.empty(0),
            scale=DIM**-0.5,
            window=0,
            softcap=0.0,
            sinks=None,
            k_scale=None,
            v_scale=None,
            keys=[read(self.k, own) for own in slots],
            values=[read(self.v, own) for own in slots],
        )


def test_a_captured_step_replays_a_thousand_batches_as_if_run_anew():
    """Planner and kernels are captured once; lengths, rows and pages change under them."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    step = RobustnessStep()
    step.load(rng)
    step.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.run()
    for replay in range(1000):
        rows = step.load(rng)
        step.poison()
        graph.replay()
        replayed = step.results()
        step.poison()
        step.run()
        for found, reference in zip(replayed, step.results(), strict=True):
            torch.testing.assert_close(found, reference, rtol=0, atol=0, equal_nan=True)
        assert replayed[0][sum(q_len for q_len, _ in rows) :].isnan().all()
        if replay % 100 == 0 and rows:
            check(step.case(rows), *replayed, served=most(step.MAX_Q_LEN))


@pytest.mark.parametrize("planner", ["stream-k", "fa3", "greedy"])
def test_layers_that_follow_each_other_share_the_plan_and_its_buffers(planner: str):
    """The next layer's kernel may start while the combine kernel before it still reads."""
    rows = [(1, 5000), *[(1, n * 40) for n in range(12)], (3, 2000)]
    layers = [make_case(rows, kv_heads=1, group=8, seed=n, device="cuda") for n in range(16)]
    plan, _ = make_plan(layers[0], planner, max_q_len=3, programs=264)
    alone = []
    for layer in layers:
        alone.append(run(layer, plan))
        torch.cuda.synchronize()
    together = [layer.results() for layer in layers]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer, (out, lse) in zip(layers, together, strict=True):
            decode(layer.inputs(out, lse), plan)
    for _ in range(50):
        for out, lse in together:
            out.fill_(float("nan"))
            lse.fill_(float("nan"))
        graph.replay()
        for found, reference in zip(together, alone, strict=True):
            assert torch.equal(found[0], reference[0]) and torch.equal(found[1], reference[1])


@pytest.mark.parametrize(("layout", "kv_dtype"), [("HND", FP8), ("NHD", BF16), ("joint", FP8)])
def test_a_pool_of_more_than_two_to_the_31_elements(layout: str, kv_dtype: torch.dtype):
    """All pages are at its end, where 32-bit addresses would be negative."""
    case = make_case(
        [(1, 700), (2, 129), (1, 0)],
        kv_heads=8,
        group=4,
        head_dim=128,
        page=128,
        kv_dtype=kv_dtype,
        layout=layout,
        first_page=2**31 // (8 * 128 * 128) + 1,
        device="cuda",
    )
    assert case.k.numel() > 2**31
    check(case, *decoded(case, max_q_len=2, programs=264))


@pytest.mark.parametrize(
    "rows", [[(1, 1_000_003)], [(1, 1_000_003), *[(1, 100)] * 30, (2, 65_536)]]
)
def test_a_row_of_a_million_tokens(rows: list[tuple[int, int]]):
    case = make_case(rows, kv_heads=1, group=8, head_dim=128, device="cuda")
    check(case, *decoded(case, max_q_len=2, programs=396, block=64))


@pytest.mark.parametrize("planner", ["stream-k", "fa3"])
@pytest.mark.parametrize("count", [256, 1500])
def test_many_rows_of_one_token(planner: str, count: int):
    case = make_case([(1, 1)] * count, head_dim=128, device="cuda")
    check(case, *decoded(case, planner, programs=264))


def test_a_wide_page_table_costs_short_rows_nothing_but_its_own_size():
    """No address is formed from its unused entries, which are junk."""
    case = make_case([(1, 40), (2, 70), (1, 500_000)], kv_heads=1, device="cuda")
    short = make_case([(1, 40), (2, 70)], kv_heads=1, device="cuda")
    check(case, *decoded(case, max_q_len=2, programs=264))
    assert case.page_table.shape[1] > 1000 * short.page_table.shape[1]


def test_two_streams_at_once_do_not_disturb_each_other():
    cases = [
        make_case([(1, n * 100 + 3) for n in range(1, 30)], seed=seed, device="cuda")
        for seed in (1, 2)
    ]
    plans = [
        make_plan(case, name, programs=264)[0]
        for case, name in zip(cases, ("stream-k", "fa3"), strict=True)
    ]
    expected = [run(case, plan) for case, plan in zip(cases, plans, strict=True)]
    streams = [torch.cuda.Stream() for _ in cases]
    torch.cuda.synchronize()
    found: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for _ in range(50):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[i].append(run(cases[i], plans[i]))
    torch.cuda.synchronize()
    for runs, reference in zip(found, expected, strict=True):
        for one in runs:
            assert torch.equal(one[0], reference[0]) and torch.equal(one[1], reference[1])


def random_kernel(rng: random.Random) -> dict[str, Any]:
    """What is compiled into the kernel."""
    dtype = rng.choice([BF16, BF16, torch.float16, torch.float32])
    return {
        "dtype": dtype,
        "kv_dtype": FP8 if dtype != torch.float32 and rng.random() < 0.3 else dtype,
        "head_dim": rng.choice([64, 80, 96, 128, 128, 192, 256]),
        "group": rng.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32]),
        "page": rng.choice([16, 16, 32, 64, 128]),
        "window": rng.choice([0, 0, 1, 100, 128, 4096]),
        "softcap": rng.choice([0.0, 0.0, 5.0]),
        "sinks": rng.random() < 0.4,
        "layout": rng.choice(["HND", "HND", "NHD", "joint", "mixed"]),
    }


def random_rows(rng: random.Random, max_q_len: int, page: int) -> list[tuple[int, int]]:
    rows = []
    longest = rng.choice([20, 300, 3000])
    for _ in range(rng.randint(1, 8)):
        near = rng.choice([1, page, 64, 128, 256]) + rng.randint(-1, 1)
        kv_len = rng.choice([0, near, rng.randint(1, longest), rng.randint(1, longest)])
        q_len = rng.choice([1, 1, rng.randint(0, max_q_len + 1)])
        rows.append((min(q_len, max(kv_len, 1)), kv_len))
    return rows


@pytest.mark.parametrize("number", range(20))
def test_a_hundred_random_cases_of_a_random_kernel(number: int):
    """Set FUZZ_SEED to what a failure printed to have it again."""
    seed = int(os.environ.get("FUZZ_SEED", random.SystemRandom().getrandbits(31)))
    print(f"FUZZ_SEED={seed}")
    rng = random.Random(seed * 20 + number)
    kernel, max_q_len = random_kernel(rng), rng.choice([1, 1, 2, 4, 8])
    while kernel["group"] * max_q_len > (128 if kernel["head_dim"] <= 128 else 64):
        max_q_len //= 2
    for i in range(100):
        rows = random_rows(rng, max_q_len, kernel["page"])
        arguments = {
            "kv_heads": rng.choice([1, 2, 3, 8]),
            "shared_pages": rng.choice([0, 0, 1, 2]),
            "strided_q": rng.random() < 0.3,
            "q_factor": rng.choice([1.0, 1.0, 8.0]),
            "seed": seed + i,
        }
        planner = rng.choice(["whole", "thin", "fa3", "stream-k", "stream-k"])
        if planner == "thin" and sum(kv_len for _, kv_len in rows) > 1000:
            planner = "stream-k"  # buffers of a partial result a block would fill the device
        spec = {"programs": rng.choice([1, 7, 132, 264]), "block": rng.choice([16, 64, 128])}
        case = make_case(rows, **kernel, **arguments, device="cuda")
        print(f"case {i}: {rows} {kernel} {arguments} {planner} {spec} max_q_len {max_q_len}")
        check(case, *decoded(case, planner, max_q_len=max_q_len, **spec), served=most(max_q_len))


PLAIN = ["decode", "flash1", "prefill"]


# The back end's Hopper kernels are not for racecheck: two groups of warps clear the same tail with
# the same zeros, on purpose, and it does not know how Triton hands tasks to warps.
@pytest.mark.parametrize(
    ("tool", "kernels"),
    [("memcheck", PLAIN), ("memcheck", ["backend"]), ("racecheck", PLAIN)],
    ids=["memcheck-plain", "memcheck-backend", "racecheck-plain"],
)
def test_compute_sanitizer_finds_nothing(tool: str, kernels: list[str]):
    """No access out of bounds, and no two threads that write different values to one place."""
    check_sanitized(tool, "tests.support.attention.sanitized_attention", kernels)
