"""What a step costs without HTTP: the host's own work, or whole steps of a model.

    python -m benchmarks.bench_step --fake               scheduler and engine CPU, no model
    python -m benchmarks.bench_step --model PATH         whole steps on this machine
    python -m benchmarks.bench_step --shape qwen3-8b     steps from graphs on a GPU, random weights

`--fake` keeps N sequences decoding on an executor that answers at once, and reports the time in
schedule() and commit() of a step, encoding of the Batch apart.  The target is 300 us at 256 rows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from runtime.batch import Batch, Masks, Sampled
from runtime.config import EngineConfig, Resolved
from runtime.engine import Engine
from runtime.messages import Request, SamplingParams

ROWS = (1, 32, 256)
VOCAB_SIZE = 151_936
PAGE_SIZE = 16


class Answered:
    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def wait(self) -> Sampled:
        return self._sampled


class InstantExecutor:
    """Samples token 1 for every row, and notes when the engine calls.

    Engine.step() calls forward() right after schedule() and sample() right after commit(), so the
    two calls divide its time.
    """

    overlap = True

    def __init__(self) -> None:
        self.scheduled_ns = 0
        self.committed_ns = 0
        self.batch: Batch | None = None

    def forward(self, batch: Batch) -> None:
        self.scheduled_ns = time.thread_time_ns()
        self.batch = batch

    def sample(self, batch: Batch, masks: Masks | None = None) -> Answered:
        self.committed_ns = time.thread_time_ns()
        return Answered(Sampled([1 if samples else -1 for samples in batch.sample]))


def fake_config(rows: int, length: int) -> Resolved:
    return Resolved(
        model="fake",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        attention="mha",
        load_format="dummy",
        max_model_len=length,
        max_num_seqs=rows,
        max_batched_tokens=8192,
        page_size=PAGE_SIZE,
        num_pages=rows * (length // PAGE_SIZE + 2),
        prefix_cache=True,
        threads=1,
        seed=0,
    )


def prompts(rows: int, prompt_len: int, max_tokens: int, aligned: bool) -> Iterator[Request]:
    """Prompts of different lengths, so that page borders are spread over the steps; or equal."""
    params = SamplingParams(max_tokens=max_tokens, stop_ids=(VOCAB_SIZE - 1,))
    for row in range(rows):
        length = prompt_len + (0 if aligned else row % PAGE_SIZE)
        tokens = [(row * 7919 + position) % VOCAB_SIZE for position in range(length)]
        yield Request(row, row % 2, tokens, params)


@contextmanager
def no_collector() -> Iterator[None]:
    """As in the engine process, where what was made at the start is frozen."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def measure_host(rows: int, steps: int, *, num_waiting: int, aligned: bool) -> dict[str, float]:
    """Medians and 99th percentile of the host's CPU time a step, in microseconds."""
    prompt_len = 128
    executor = InstantExecutor()
    length = prompt_len + PAGE_SIZE + steps + 64
    engine = Engine(fake_config(rows, length), VOCAB_SIZE, executor)
    for request in prompts(rows, prompt_len, steps + 60, aligned):
        engine.add(request)
    for number in range(num_waiting):
        engine.add(Request(10_000 + number, 0, [1, 2, 3], SamplingParams(max_tokens=4)))
    while engine.stats().step_tokens != rows:
        engine.step()
    for _ in range(20):
        engine.step()
    parts: list[tuple[float, float]] = []
    with no_collector():
        for _ in range(steps):
            began = time.thread_time_ns()
            engine.step()
            scheduled, committed = executor.scheduled_ns, executor.committed_ns
            parts.append(((scheduled - began) / 1000, (committed - scheduled) / 1000))
    assert engine.stats().step_tokens == rows, "a sequence ended while it was measured"
    totals = sorted(sum(part) for part in parts)
    return {
        "schedule": statistics.median(part[0] for part in parts),
        "commit": statistics.median(part[1] for part in parts),
        "total": statistics.median(totals),
        "p99": totals[int(len(totals) * 0.99)],
        "encode": encode_microseconds(executor.batch),
    }


def encode_microseconds(batch: Batch | None) -> float:
    """What a batch costs where it must travel to another rank."""
    encoder = msgspec.msgpack.Encoder()
    times: list[int] = []
    for _ in range(50):
        began = time.thread_time_ns()
        encoder.encode(batch)
        times.append(time.thread_time_ns() - began)
    return statistics.median(times) / 1000


def bench_fake(steps: int) -> None:
    print("host CPU a step, microseconds (medians; p99 of the total)")
    print(
        f"{'rows':>5} {'case':<22} {'schedule':>9} {'commit':>8} {'total':>8} {'p99':>8} "
        f"{'encode':>8}"
    )
    for rows in ROWS:
        for case, num_waiting, aligned in (
            ("spread page borders", 0, False),
            ("10000 wait", 10_000, False),
            ("borders in one step", 0, True),
        ):
            us = measure_host(rows, steps, num_waiting=num_waiting, aligned=aligned)
            print(
                f"{rows:>5} {case:<22} {us['schedule']:>9.1f} {us['commit']:>8.1f} "
                f"{us['total']:>8.1f} {us['p99']:>8.1f} {us['encode']:>8.1f}"
            )


def bench_model(path: str, steps: int, prompt_len: int) -> None:
    """Whole steps of a model: decoding at each number of rows, and the prompts before."""
    from runtime.loading import load

    config = EngineConfig(model=path, max_num_seqs=max(ROWS))
    loaded = load(config, lambda phase, done, total: None)
    ready = loaded.ready
    print(f"{path} on {ready.device}, {ready.dtype}, attention {ready.attention}")
    print("rows   decode ms/step   decode tokens/s   prompt tokens/s")
    for rows in ROWS:
        engine = Engine(loaded.resolved, ready.vocab_size, loaded.executor)
        params = SamplingParams(max_tokens=steps, temperature=0.0)
        for row in range(rows):
            tokens = [(row * 31 + place * 7) % ready.vocab_size for place in range(prompt_len)]
            engine.add(Request(row, 0, tokens, params))
        began = time.perf_counter()
        while engine.stats().prompt_tokens < rows * prompt_len or engine.stats().step_tokens > rows:
            engine.step()
        prompt_seconds = time.perf_counter() - began
        decode: list[float] = []
        while engine.has_work:
            engine.step()
            if engine.stats().step_tokens == rows:
                decode.append(engine.stats().step_seconds)
        seconds = statistics.median(decode)
        print(
            f"{rows:>4} {seconds * 1000:>16.2f} {rows / seconds:>17.0f} "
            f"{rows * prompt_len / prompt_seconds:>17.0f}"
        )


def bench_shape(arguments: argparse.Namespace) -> None:
    """Steps of rows that decode at each context, and of 32 such rows beside a prompt."""
    from benchmarks.shapes import write_model
    from benchmarks.step_parts import bench_captures, bench_engine, bench_steps
    from runtime.loading import load

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(arguments.shape, Path(folder) / "model", layers=arguments.layers)
        config = EngineConfig(
            model=str(path), device="cuda", load_format="dummy", max_num_seqs=max(arguments.rows),
            max_model_len=max(8192, *arguments.contexts),
        )  # fmt: skip
        loaded = load(config, lambda phase, done, total: None)
    ready = loaded.ready
    print(f"{arguments.shape} on {ready.device}, {ready.dtype}, attention {ready.attention}")
    print(f"ready after {ready.load_seconds:.1f} s; " + ", ".join(
        f"{name} {seconds:.2f} s" for name, seconds in ready.phases
    ))  # fmt: skip
    print(", ".join(f"{name} {count / 2**30:.2f} GiB" for name, count in ready.memory))
    steps = [[(1, context)] * rows for rows in arguments.rows for context in arguments.contexts]
    bench_captures(loaded)
    few = min(31, max(arguments.rows) - 1)
    steps += [[(1, 1024)] * few + [(prompt, prompt)] for prompt in arguments.prompts]
    bench_steps(loaded, steps, bandwidth=arguments.bandwidth, kernels=arguments.kernels)
    for rows in sorted({1, min(32, max(arguments.rows)), max(arguments.rows)}):
        bench_engine(loaded, rows, 128, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    numbers = {"type": int, "nargs": "*"}
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--fake", action="store_true", help="the host's work alone, no model")
    which.add_argument("--model", metavar="PATH", help="directory of a model")
    which.add_argument("--shape", help="name of a published shape: random weights, on a GPU")
    parser.add_argument("--rows", default=[1, 8, 32, 128, 256], help="that decode", **numbers)
    parser.add_argument("--contexts", default=[256, 1024, 4096], help="KV lengths", **numbers)
    parser.add_argument("--prompts", default=[33, 481, 2017], help="tokens beside rows", **numbers)
    parser.add_argument("--layers", type=int, default=0, help="with --shape, fewer than it has")
    parser.add_argument("--bandwidth", type=float, default=3.08e12, help="bytes/s, for floors")
    parser.add_argument("--kernels", action="store_true", help="the longest kernels of each step")
    parser.add_argument("--steps", type=int, default=300, help="steps measured a case")
    parser.add_argument("--prompt-len", type=int, default=64, help="prompt tokens, with --model")
    arguments = parser.parse_args()
    if arguments.fake:
        bench_fake(arguments.steps)
    elif arguments.shape:
        bench_shape(arguments)
    else:
        bench_model(arguments.model, arguments.steps, arguments.prompt_len)


if __name__ == "__main__":
    main()
