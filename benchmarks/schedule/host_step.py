"""The host's CPU time of a step, by parts, on an executor that answers at once.

schedule  choose what runs             queue    fill the input block for the device
commit    process the results          publish  send outputs to two API processes
"""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs

from runtime.config import ResolvedConfig
from runtime.cuda_graph.buckets import Bucket, Buckets
from runtime.cuda_graph.buffers import HostBlock, Layout
from runtime.engine.loop import Engine
from runtime.engine.process import OutputPublisher
from runtime.messages import EngineRequest, SamplingParams
from runtime.scheduler.batch import Batch, Masks, ModelRunnerOutput
from runtime.stats import Stats

ROWS = (1, 32, 256)
VOCAB_SIZE = 151_936
PAGE_SIZE = 16
MAX_TOKENS = 8192
CACHES_BYTES = 64 << 20  # as much as a host's caches hold, or more
PARTS = ("schedule", "queue", "commit", "publish")


@dataclass(frozen=True)
class HostStepCase:
    name: str
    waiting: int = 0  # requests that find no slot
    aligned: bool = False  # all rows need a page in the same step
    prompts: int = 0  # long ones, in chunks in the steps of the decode rows
    cold: bool = False  # nothing is left in the caches, as after sleeping while a GPU works


CASES = (
    HostStepCase("spread page borders"),
    HostStepCase("borders in one step", aligned=True),
    HostStepCase("10000 wait", waiting=10_000),
    HostStepCase("mixed with prompts", prompts=12),
    HostStepCase("caches overwritten", cold=True),
)


class ReadyResult:
    def __init__(self, sampled: ModelRunnerOutput) -> None:
        self._sampled = sampled

    def wait(self) -> ModelRunnerOutput:
        return self._sampled


class QueueingExecutor:
    """Samples token 1 for every row; fills a block as for a device, and records when.

    Engine.step_columns() calls forward() right after schedule(), which divides its time.
    """

    overlap = True

    def __init__(self, rows: int) -> None:
        self._buckets = Buckets(rows, MAX_TOKENS)
        num_bytes = max(Layout.of(bucket).packed.num_bytes for bucket in self._buckets.largest)
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8)
        self._blocks: dict[Bucket, HostBlock] = {}
        self._pages_before = np.zeros(rows, dtype=np.int32)
        self.scheduled_ns = self.queued_ns = 0

    def forward(self, batch: Batch) -> None:
        self.scheduled_ns = time.thread_time_ns()
        rows = len(batch.slots)
        bucket = self._buckets.fit(len(batch.tokens), rows)
        if bucket not in self._blocks:
            self._blocks[bucket] = HostBlock(self._memory, Layout.of(bucket))
        before = self._pages_before[:rows]
        self._blocks[bucket].fill(batch, before, before)
        self.queued_ns = time.thread_time_ns()

    def prepare(self) -> bool:
        return False

    def sample(self, batch: Batch, masks: Masks | None = None) -> ReadyResult:
        return ReadyResult(
            ModelRunnerOutput(np.where(batch.sample, 1, -1).astype(np.int32)[:, None])
        )


def fake_config(rows: int, length: int) -> ResolvedConfig:
    return ResolvedConfig(
        model="fake",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention="mha",
        load_format="dummy",
        max_model_len=length,
        max_num_seqs=rows,
        max_batched_tokens=MAX_TOKENS,
        page_size=PAGE_SIZE,
        num_pages=rows * (length // PAGE_SIZE + 2),
        prefix_cache=True,
        threads=1,
        seed=0,
    )


def prompts(rows: int, prompt_len: int, max_tokens: int, aligned: bool) -> Iterator[EngineRequest]:
    """Prompts of different lengths, so that page borders are spread over the steps; or equal."""
    params = SamplingParams(max_tokens=max_tokens, stop_ids=(VOCAB_SIZE - 1,))
    for row in range(rows):
        length = prompt_len + (0 if aligned else row % PAGE_SIZE)
        tokens = [(row * 7919 + position) % VOCAB_SIZE for position in range(length)]
        yield EngineRequest(row, row % 2, tokens, params)


@contextmanager
def no_collector() -> Iterator[None]:
    """As in the engine process, where what was made at the start is frozen."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def measure_host(rows: int, steps: int, case: HostStepCase) -> dict[str, float]:
    """Medians of each part of a step's CPU time, their sum and its 99th percentile, in us."""
    prompt_len = 128
    overwritten = np.zeros(CACHES_BYTES if case.cold else 0, dtype=np.uint8)
    executor = QueueingExecutor(rows + case.prompts)
    max_tokens = steps + 160  # the first sequences decode during the last prompts' prefill
    length = prompt_len + PAGE_SIZE + max_tokens
    config = fake_config(rows + case.prompts, max(length, 20_000 if case.prompts else 0))
    # Small steps, so that the prompts last.
    most = rows + 512 if case.prompts else MAX_TOKENS
    config = structs.replace(config, device="cuda", max_batched_tokens=most)
    engine = Engine(config, VOCAB_SIZE, executor)
    for request in prompts(rows, prompt_len, max_tokens, case.aligned):
        engine.add(request)
    while engine.stats().step_tokens != rows:
        engine.step()
    for number in range(case.waiting):
        engine.add(EngineRequest(10_000 + number, 0, [1, 2, 3], SamplingParams(max_tokens=4)))
    for number in range(case.prompts):
        tokens = [number] * 16_000
        engine.add(EngineRequest(20_000 + number, 0, tokens, SamplingParams(max_tokens=1)))
    for _ in range(20):
        engine.step()
    with tempfile.TemporaryDirectory() as folder, no_collector():
        addresses = [f"ipc://{folder}/api-{number}" for number in range(2)]
        with closing(OutputPublisher(addresses)) as publisher:
            for id in (*range(rows), *range(20_000, 20_000 + case.prompts)):
                publisher.register(EngineRequest(id, id % 2, [], SamplingParams(1)), Stats())
            times: list[tuple[float, float, float, float]] = []
            for _ in range(steps):
                np.add(overwritten, 1, out=overwritten)
                times.append(step_times(engine, executor, publisher))
    assert case.prompts or engine.stats().step_tokens == rows, "a sequence ended meanwhile"
    totals = sorted(sum(parts) for parts in times)
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return dict(zip(PARTS, medians, strict=True)) | {
        "total": statistics.median(totals),
        "p99": totals[int(len(totals) * 0.99)],
    }


def step_times(
    engine: Engine, executor: QueueingExecutor, publisher: OutputPublisher
) -> tuple[float, float, float, float]:
    """Microseconds of each of PARTS in one step."""
    began = time.thread_time_ns()
    engine_outputs = engine.step_columns()
    publishing = time.thread_time_ns()
    publisher.publish(engine_outputs, engine.stats())
    ended = time.thread_time_ns()
    return (
        (executor.scheduled_ns - began) / 1000,
        (executor.queued_ns - executor.scheduled_ns) / 1000,
        (publishing - executor.queued_ns) / 1000,
        (ended - publishing) / 1000,
    )


def bench_fake(steps: int) -> None:
    print("host CPU a step, microseconds (medians; p99 of the total)")
    heads = (*PARTS, "total", "p99")
    print(f"{'rows':>5} {'case':<22}" + "".join(f"{head:>9}" for head in heads))
    for rows in ROWS:
        for case in CASES:
            us = measure_host(rows, steps, case)
            print(f"{rows:>5} {case.name:<22}" + "".join(f"{us[head]:>9.1f}" for head in heads))
