"""The cost of a step without HTTP: the host's CPU time, or whole steps of a model.

    python -m benchmarks.step.bench_step --fake               scheduler and engine CPU, no model
    python -m benchmarks.step.bench_step --model PATH         whole steps on this machine
    python -m benchmarks.step.bench_step --shape qwen3-8b     graphs on a GPU, random weights

`--fake` keeps N sequences decoding on an executor that answers at once, and reports the time in
each part of a step (host_step.py).  The target is 300 us at 256 rows.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from runtime.config import EngineConfig

ROWS = (1, 32, 256)


def bench_model(path: str, steps: int, prompt_len: int) -> None:
    """Whole steps of a model: decoding at each number of rows, and the prompts before."""
    from benchmarks.step.step_parts import engine_of
    from runtime.startup.loading import load

    config = EngineConfig(model=path, max_num_seqs=max(ROWS))
    loaded = load(config, lambda phase, done, total: None)
    ready = loaded.ready
    print(f"{path} on {ready.device}, {ready.dtype}, attention {ready.attention}")
    print("rows   decode ms/step   decode tokens/s   prompt tokens/s")
    for rows in ROWS:
        engine = engine_of(loaded, rows, prompt_len, steps)
        began = time.perf_counter()
        while engine.stats().prompt_tokens < rows * prompt_len or engine.stats().step_tokens > rows:
            engine.step()
        prompt_seconds = time.perf_counter() - began
        decode: list[float] = []
        while not engine.idle:
            engine.step()
            if engine.stats().step_tokens == rows:
                decode.append(engine.stats().step_seconds)
        seconds = statistics.median(decode)
        print(
            f"{rows:>4} {seconds * 1000:>16.2f} {rows / seconds:>17.0f} "
            f"{rows * prompt_len / prompt_seconds:>17.0f}"
        )


def bench_shape(arguments: argparse.Namespace) -> None:
    """Steps of rows that decode at each context, and of 32 such rows with a prompt."""
    from benchmarks.shapes import write_model
    from benchmarks.step.step_parts import (
        bench_captures,
        bench_engine,
        bench_launches,
        bench_steps,
    )
    from runtime.precompile.pool import Compilers
    from runtime.startup.loading import load

    with tempfile.TemporaryDirectory() as folder:
        path = write_model(
            arguments.shape, Path(folder) / "model", layers=arguments.layers,
            quantization=arguments.format,
        )  # fmt: skip
        config = EngineConfig(
            model=str(path), device="cuda", load_format="dummy", max_num_seqs=max(arguments.rows),
            max_model_len=max(8192, *arguments.contexts), gpu_memory=arguments.gpu_memory,
            max_batched_tokens=arguments.batched_tokens, deterministic=arguments.deterministic,
            quantization=arguments.quantization, kv_dtype=arguments.kv_dtype,
        )  # fmt: skip
        loaded = load(config, lambda phase, done, total: None, compilers=Compilers())
    ready = loaded.ready
    print(f"{arguments.shape} on {ready.device}, {ready.dtype}, attention {ready.attention}")
    print(f"ready after {ready.load_seconds:.1f} s; " + ", ".join(
        f"{name} {seconds:.2f} s" for name, seconds in ready.phases
    ))  # fmt: skip
    print(", ".join(f"{name} {count / 2**30:.2f} GiB" for name, count in ready.memory))
    bench_launches(loaded, arguments.large)
    steps = [[(1, context)] * rows for rows in arguments.rows for context in arguments.contexts]
    bench_captures(loaded)
    few = min(31, max(arguments.rows) - 1)
    steps += [
        [(1, 1024)] * few + [(prompt, max(prompt, arguments.prompt_context))]
        for prompt in arguments.prompts
    ]
    bench_steps(loaded, steps, bandwidth=arguments.bandwidth, kernels=arguments.kernels)
    for rows in sorted({1, min(32, max(arguments.rows)), max(arguments.rows)}):
        bench_engine(loaded, rows, 128, 60 + rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    numbers = {"type": int, "nargs": "*"}
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--fake", action="store_true", help="the host's work alone, no model")
    which.add_argument("--model", metavar="PATH", help="directory of a model")
    which.add_argument("--shape", help="name of a published shape: random weights, on a GPU")
    parser.add_argument("--rows", default=[1, 8, 32, 128, 256], help="that decode", **numbers)
    parser.add_argument("--contexts", default=[256, 1024, 4096], help="KV lengths", **numbers)
    parser.add_argument(
        "--prompts", default=[33, 481, 2017], help="tokens, in mixed steps", **numbers
    )
    parser.add_argument(
        "--prompt-context", type=int, default=0, help="KV length of a chunk's row, in mixed steps"
    )
    parser.add_argument(
        "--large", default=[], help="tokens of prompts that run without a graph", **numbers
    )
    parser.add_argument("--layers", type=int, default=0, help="with --shape, fewer than it has")
    parser.add_argument("--gpu-memory", type=float, default=0.9, help="with --shape, its share")
    parser.add_argument(
        "--batched-tokens", type=int, default=0, help="with --shape, of a step at most: less memory"
    )
    parser.add_argument("--deterministic", action="store_true", help="with --shape, its kernels")
    parser.add_argument("--format", default=None, help="with --shape, of weights: as bench_loads")
    parser.add_argument(
        "--quantization", choices=["auto", "fp8"], default="auto", help="with --shape, of weights"
    )
    parser.add_argument(
        "--kv-dtype", choices=["auto", "fp8_e4m3"], default="auto", help="with --shape"
    )
    parser.add_argument("--bandwidth", type=float, default=3.08e12, help="bytes/s, for floors")
    parser.add_argument("--kernels", action="store_true", help="the longest kernels of each step")
    parser.add_argument("--steps", type=int, default=300, help="steps measured a case")
    parser.add_argument("--prompt-len", type=int, default=64, help="prompt tokens, with --model")
    arguments = parser.parse_args()
    if arguments.fake:
        from benchmarks.schedule.host_step import bench_fake

        bench_fake(arguments.steps)
    elif arguments.shape:
        bench_shape(arguments)
    else:
        bench_model(arguments.model, arguments.steps, arguments.prompt_len)


if __name__ == "__main__":
    main()
