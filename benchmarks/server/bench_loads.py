"""Serve a model of a published shape with random weights, and measure the usual loads.

    python -m benchmarks.server.bench_loads qwen3-8b qwen3-0.6b [--only c1,c32] [--out DIRECTORY]

Fixed lengths, ignore-eos, greedy, closed loop, every prompt different.  The last columns are what
vLLM 0.20.0 reached on an H100 80GB with the same shapes and loads (default flags and
--max-model-len 32768, measured with its own `bench serve` on 2026-11-20).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.shapes import write_model

READY_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class LoadCase:
    """A closed loop, and vLLM's output tokens a second, TPOT, ITL p99 and TTFT p50 in ms."""

    name: str
    clients: int
    input_len: int
    output_len: int
    prompts: int
    peer: tuple[float | None, float | None, float | None, float | None]


LOADS = {
    "qwen3-8b": (
        LoadCase("c1", 1, 128, 256, 5, (133.7, 6.82, None, 24.7)),
        LoadCase("c8", 8, 1024, 256, 24, (969.9, 7.41, None, 221)),
        LoadCase("c32", 32, 1024, 256, 96, (2783.8, 9.06, 21.4, 413)),
        LoadCase("c128", 128, 1024, 256, 256, (5118.7, 22.0, 204, None)),
        LoadCase("c256", 256, 1024, 256, 512, (5290.3, 41.3, 211, 1668)),
        LoadCase("prefill", 32, 4096, 8, 128, (38_171 / 513, None, None, 1867)),
        LoadCase("long", 8, 16_384, 128, 16, (22_945 / 129, None, 289, None)),
    ),
    "qwen3-0.6b": (
        LoadCase("c1", 1, 128, 256, 8, (397, 1.91, 2.9, 18.3)),
        LoadCase("c32", 32, 128, 128, 256, (7631, 3.41, 9.4, 107)),
        LoadCase("c128", 128, 128, 128, 1024, (21_898, 4.07, 19.0, 176)),
        LoadCase("c256", 256, 128, 128, 2048, (13_516, 15.0, 44.6, 519)),
        LoadCase("c64", 64, 1024, 256, 256, (9203, 5.46, 34.7, 388)),
    ),
}


@contextmanager
def server(
    model: Path, port: int, log: Path, options: list[str], *, simulated: bool = False
) -> Iterator[float]:
    """A server that is ready; yields the seconds from the command to that."""
    module = "benchmarks.schedule.simulated_engine" if simulated else "server.cli.main"
    program = f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", str(model), "--load-format", "dummy"]
    command += ["--port", str(port), *options]
    with log.open("w") as output:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            while not _is_ready(port):
                if process.poll() is not None or time.monotonic() - began > READY_SECONDS:
                    raise SystemExit(f"the server did not get ready:\n{log.read_text()[-3000:]}")
                time.sleep(0.02)
            yield time.monotonic() - began
        finally:
            process.terminate()
            process.wait(30)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def measure(load: LoadCase, port: int, seed: int, out: Path, options: list[str]) -> dict[str, Any]:
    """The figures of one load as `wavefill bench serve --json` writes them."""
    path = out / f"{load.name}.{seed}.json"
    command = [sys.executable, "-m", "benchmarks.server.bench_serve", "--ignore-eos"]
    command += ["--base-url", f"http://127.0.0.1:{port}/v1", "--vocab-size", "30000"]
    command += ["--concurrency", str(load.clients), "--num-prompts", str(load.prompts)]
    command += ["--input-len", str(load.input_len), "--output-len", str(load.output_len)]
    command += ["--warmup", str(min(load.clients, 8)), "--seed", str(seed), "--json", str(path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=400)
    if not path.exists():
        raise SystemExit(f"{load.name}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    return json.loads(path.read_text())


def _spread(figures: dict[str, Any], name: str, field: str) -> float | None:
    spread = figures.get(name)
    return None if spread is None else spread[field]


def row(load: LoadCase, figures: dict[str, Any]) -> str:
    summary = figures.get("summary", figures)
    ours = (
        summary["output_tokens_per_s"],
        _spread(summary, "tpot_ms", "p50"),
        _spread(summary, "itl_ms", "p99"),
        _spread(summary, "ttft_ms", "p50"),
    )
    numbers = [f"{load.name} {load.input_len}/{load.output_len}"]
    numbers += ["-" if value is None else f"{value:.4g}" for value in ours]
    numbers.append(f"{summary['total_tokens_per_s']:.0f}")
    numbers.append(f"{_spread(summary, 'itl_ms', 'p50') or 0:.2f}")
    numbers += ["-" if value is None else f"{value:.4g}" for value in load.peer]
    return "| " + " | ".join(numbers) + " |"


HEAD = (
    "| load | out tok/s | TPOT p50 ms | ITL p99 ms | TTFT p50 ms | total tok/s | ITL p50 ms "
    "| vLLM out tok/s | TPOT | ITL p99 | TTFT |\n" + "|---" * 11 + "|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", choices=sorted(LOADS))
    parser.add_argument("--only", default="", help="names of loads, with commas")
    parser.add_argument("--layers", type=int, default=0, help="cut the model, to try this out")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--out", type=Path, default=None, help="where figures and logs go")
    parser.add_argument("--serve", default="", help="more options of `wavefill serve`")
    parser.add_argument("--bench", default="", help="more options of `wavefill bench serve`")
    parser.add_argument(
        "--simulated", action="store_true", help="no device: simulate the steps of qwen3-8b"
    )
    args = parser.parse_args()
    if args.simulated and args.shapes != ["qwen3-8b"]:
        parser.error("--simulated: only the steps of qwen3-8b are simulated")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    selected = set(filter(None, args.only.split(",")))
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        for shape in args.shapes:
            folder = out / shape
            folder.mkdir(parents=True, exist_ok=True)
            model = write_model(shape, Path(temporary) / f"{shape}.model", layers=args.layers)
            options = ["--max-model-len", "32768", *args.serve.split()]
            if args.simulated:
                options += ["--device", "cpu"]
            log = folder / "serve.log"
            with server(model, args.port, log, options, simulated=args.simulated) as ready:
                of = " on a simulated device, which measures no GPU" if args.simulated else ""
                print(f"{shape}{of}: ready after {ready:.1f} s\n{HEAD}", flush=True)
                for seed, load in enumerate(LOADS[shape], start=int(time.time()) % 100_000):
                    if not selected or load.name in selected:
                        figures = measure(load, args.port, seed, folder, args.bench.split())
                        print(row(load, figures), flush=True)


if __name__ == "__main__":
    main()
