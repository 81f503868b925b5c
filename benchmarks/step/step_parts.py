"""The time of a captured step on a GPU, by parts, and its lower bound.

A step's block is sent once and its graph replayed: tokens are sampled anew, lengths stay.
Pages are scattered over a pool of random numbers.  The floor is the time in which the step's bytes
(weights once, of experts those that are chosen, keys and values of all rows) can be read at the
given bandwidth, or its GEMMs computed, whichever is longer.
"""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from attention.kv_pool import KVPool
from benchmarks.attention.timing import elapsed_us
from model_zoo.layers.linear import Linear
from model_zoo.layers.moe.experts import Experts
from model_zoo.model import Model
from runtime.cuda_graph.executor import GraphExecutor
from runtime.cuda_graph.launch import StepLaunch
from runtime.engine.loop import Engine
from runtime.messages import EngineRequest, SamplingParams
from runtime.scheduler.batch import Batch, NewRow, make_batch
from runtime.scheduler.kv_cache.sequence_pages import NO_PAGE
from runtime.startup.loading import Loaded

FLOPS = 790e12  # a second, of its GEMMs in 16 bits
SAMPLED_PARAMS = SamplingParams(max_tokens=1, temperature=1.0)
PARTS = {
    "attention": r"decode|prefill|combine|merge|flash",
    "plan": r"prepare|plan_|apply_rows",
    "sample": r"scan_groups|filter_rows|finish_rows",
    "gemm": r"gemm|gemv|nvjet|cutlass|cublas|split_?k|swiglu_gemm_hopper|ampere|sm90|sm80",
}


@dataclass(frozen=True)
class ExpertSizes:
    """Of the experts of a layer."""

    count: int  # of which each token gets top_k
    top_k: int
    bytes_each: float
    gemms: int  # multiplications of a token

    def bytes_read(self, tokens: int) -> float:
        """By so many tokens with random experts, on average."""
        chosen = self.count * (1 - (1 - self.top_k / self.count) ** tokens)
        return chosen * self.bytes_each


@dataclass(frozen=True)
class StepSizes:
    """What steps of a model read and multiply, for floors; states are left out."""

    weight_bytes: int  # that a step reads, whatever its tokens: no embedding, no experts
    kv_bytes: int  # of a token in all layers
    gemms: int  # multiplications of a token outside of the head and of experts
    head: int  # and in the head
    experts: tuple[ExpertSizes, ...] = ()  # of each layer that has some

    def floor_ms(self, rows: list[tuple[int, int]], bandwidth: float) -> float:
        """Milliseconds of a step of rows (q_len, KV length)."""
        tokens, kv = sum(q_len for q_len, _ in rows), sum(kv_len for _, kv_len in rows)
        read = self.weight_bytes + sum(experts.bytes_read(tokens) for experts in self.experts)
        gemms = self.gemms + sum(experts.gemms for experts in self.experts)
        computed = 2 * (tokens * gemms + len(rows) * self.head) / FLOPS
        return 1000 * max((read + kv * self.kv_bytes) / bandwidth, computed)


def sizes_of(model: Model, kv: KVPool) -> StepSizes:
    inner = [m for name, m in model.named_modules() if name.startswith("layers.")]
    linears = [module for module in inner if isinstance(module, Linear)]
    mixtures = [module for module in inner if isinstance(module, Experts)]
    return StepSizes(
        weight_bytes=sum(linear.operand.nbytes for linear in (*linears, model.head)),
        kv_bytes=2 * kv.k[:, 0, :, 0].numel() * kv.k.element_size(),
        gemms=sum(linear.outputs * linear.inputs for linear in linears),
        head=model.head.outputs * model.head.inputs,
        experts=tuple(
            ExpertSizes(
                each.all_experts,
                each.top_k,
                each.nbytes / each.num_experts,
                3 * each.top_k * each.hidden * each.inner,
            )
            for each in mixtures
        ),
    )


def batch_of(
    rows: list[tuple[int, int]], pool: KVPool, vocab: int, rng: random.Random
) -> Batch | None:
    """A step of rows (q_len, KV length), each of its own scattered pages and with its own state.

    None: the pool has too few.
    """
    assert pool.layout is not None
    size, windows = pool.page_size, pool.layout.windows
    counts = [-(-kv_len // size) for _, kv_len in rows]
    starts = [kv_len - q_len for q_len, kv_len in rows]
    is_held = [
        not window or (page + 1) * size > start - window
        for start, count in zip(starts, counts, strict=True)
        for page in range(count)
        for window in windows
    ]
    if sum(is_held) > pool.num_pages or (pool.states and len(rows) > pool.states.num_states):
        return None
    pages = iter(rng.sample(range(pool.num_pages), sum(is_held)))
    return make_batch(
        slots=list(range(len(rows))),
        starts=starts,
        q_lens=[q_len for q_len, _ in rows],
        tokens=[rng.randrange(vocab) for q_len, _ in rows for _ in range(q_len)],
        num_new_pages=counts,
        new_pages=[next(pages) if held else NO_PAGE for held in is_held],
        sample=[True] * len(rows),
        decode_rows=sum(q_len == 1 for q_len, _ in rows),
        new_rows=[NewRow(row, SAMPLED_PARAMS, row, 1, []) for row in range(len(rows))],
        state_slots=list(range(len(rows))) if pool.states else (),
    )


def captured(runner: GraphExecutor, batch: Batch) -> Callable[[], object]:
    """Run the batch -> a function that replays its step."""
    best = runner._buckets.fit(len(batch.tokens), len(batch.slots))
    if runner.planner.take(best, needs_room=False):
        runner.graphs.capture(best)
    runner.forward(batch)
    runner.sample(batch).wait()
    return runner.graphs.captured[best].graph.replay


def milliseconds(replay: Callable[[], object], seconds: float) -> float:
    """Of one replay: the median of five runs of equal length."""

    def timed(count: int) -> float:
        return elapsed_us(lambda: [replay() for _ in range(count)]) / 1000 / count

    count = max(2, int(seconds * 200 / max(timed(2), 0.05)))
    return statistics.median(timed(count) for _ in range(5))


def part_of(name: str) -> str:
    for part, pattern in PARTS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return part
    return "small"


def parts_of(replay: Callable[[], object]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Microseconds of one replay by part, `gaps` with them, and by kernel (times, in order).

    Time in which several kernels run counts for the first of them: the others were launched early
    (dependent launch), and mostly wait.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        replay()
        torch.cuda.synchronize()
    results = profile.profiler
    assert results is not None
    spans = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in results.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    )
    parts = dict.fromkeys([*PARTS, "small", "gaps"], 0.0)
    kernels: dict[str, list[float]] = {}
    reached = spans[0][0]
    for start, end, name in spans:
        parts["gaps"] += max(start - reached, 0) / 1000
        own = max(end - max(start, reached), 0) / 1000
        parts[part_of(name)] += own
        kernels.setdefault(name, []).append(own)
        reached = max(reached, end)
    return parts, kernels


def bench_steps(
    loaded: Loaded, shape: list[list[tuple[int, int]]], *, bandwidth: float, kernels: bool
) -> None:
    """A line a step; each is a list of rows (q_len, KV length)."""
    runner = loaded.executor
    assert isinstance(runner, GraphExecutor), "a GPU is needed"
    model, pool = runner._model, runner._step.kv
    assert isinstance(model, Model)
    sizes = sizes_of(model, pool)
    for tensor in (pool.k, pool.v):
        for layer in tensor:
            layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=layer.device))
    rng = random.Random(0)
    heads = "".join(f"{name:>10}" for name in [*PARTS, "small", "gaps"])
    print(f"{'rows':>5} {'tokens':>6} {'context':>7} {'ms':>8}{heads}{'floor':>8} {'share':>6}")
    for rows in shape:
        batch = batch_of(rows, pool, loaded.ready.vocab_size, rng)
        if batch is None:
            print(f"{len(rows):>5} rows of {rows[0][1]} tokens: too few pages or states")
            continue
        replay = captured(runner, batch)
        took = milliseconds(replay, 0.1)
        parts, by_kernel = parts_of(replay)
        cells = "".join(f"{us / 1000:>10.3f}" for us in parts.values())
        floor = sizes.floor_ms(rows, bandwidth)
        print(
            f"{len(rows):>5} {len(batch.tokens):>6} {rows[0][1]:>7} {took:>8.3f}{cells}"
            f"{floor:>8.3f} {floor / took:>6.1%}",
            flush=True,
        )
        if kernels:
            for name, times in sorted(by_kernel.items(), key=lambda item: -sum(item[1]))[:14]:
                middle = statistics.median(times)
                print(
                    f"        {sum(times):>9.1f} us {len(times):>4} x {middle:>7.2f}  {name[:80]}"
                )


def bench_launches(loaded: Loaded, sizes: list[int], times: int = 5) -> None:
    """Steps of one prompt each, without a graph: how long the host launches, and the whole step.

    Medians, after two that load what is loaded once.
    """
    runner = loaded.executor
    assert isinstance(runner, GraphExecutor), "a GPU is needed"
    for tokens in sizes:
        batch = batch_of(
            [(tokens, tokens)], runner._step.kv, loaded.ready.vocab_size, random.Random(0)
        )
        if batch is None:
            print(f"{tokens:>6} tokens: too few pages or states")
            continue
        launch = StepLaunch(batch, runner._buckets.fit(tokens, 1), False, False)
        launched: list[float] = []
        ended: list[float] = []
        for _ in range(2 + times):
            torch.cuda.synchronize()
            began = time.perf_counter()
            runner.run(launch)
            launched.append(time.perf_counter() - began)
            runner.sample(batch).wait()
            ended.append(time.perf_counter() - began)
        host, step = (1e3 * statistics.median(each[2:]) for each in (launched, ended))
        print(
            f"{tokens:>6} tokens without a graph: launched in {host:.1f} ms, {step:.1f} ms a step",
            flush=True,
        )


def bench_captures(loaded: Loaded, count: int = 8) -> None:
    """What one more graph takes, of the host's time and of the device's memory."""
    free, times = torch.cuda.mem_get_info()[0], [time.perf_counter()]
    for _ in range(count):
        loaded.executor.prepare()
        times.append(time.perf_counter())
    each = [1000 * (end - begin) for begin, end in pairwise(times)]
    taken = (free - torch.cuda.mem_get_info()[0]) / 2**20 / count
    print(f"a graph: {statistics.median(each):.1f} ms, at most {max(each):.1f}; {taken:.2f} MiB")


def engine_of(loaded: Loaded, rows: int, prompt_len: int, steps: int) -> Engine:
    """An engine with `rows` requests of prompt_len tokens, answered greedily by `steps` tokens."""
    engine = Engine(loaded.resolved, loaded.ready.vocab_size, loaded.executor)
    params = SamplingParams(max_tokens=steps, temperature=0.0)
    for row in range(rows):
        tokens = [(row * 31 + place * 7) % loaded.ready.vocab_size for place in range(prompt_len)]
        engine.add(EngineRequest(row, 0, tokens, params))
    return engine


def bench_engine(loaded: Loaded, rows: int, prompt_len: int, steps: int) -> None:
    """The whole engine: what a step takes, and what of it the host computes."""
    engine = engine_of(loaded, rows, prompt_len, steps)
    walls: list[float] = []
    hosts: list[float] = []
    while not engine.idle:
        wall, host = time.perf_counter(), time.thread_time()
        engine.step_columns()
        if engine.stats().step_tokens == rows:
            walls.append(time.perf_counter() - wall)
            hosts.append(time.thread_time() - host)
    print(
        f"engine, {rows:>4} rows: {statistics.median(walls) * 1e3:8.3f} ms a step, "
        f"{statistics.median(hosts) * 1e6:6.0f} us of them on the host's CPU",
        flush=True,
    )
