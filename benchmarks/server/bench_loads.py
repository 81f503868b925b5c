"""Serve a model of a published shape with random weights, and measure the usual loads.

    python -m benchmarks.server.bench_loads qwen3-8b qwen3-0.6b [--only c1,c32] [--out DIRECTORY]
    python -m benchmarks.server.bench_loads qwen3-8b --peer http://127.0.0.1:8000
    python -m benchmarks.server.bench_loads qwen3-30b-a3b gpt-oss-20b --format mxfp4

Fixed lengths, ignore-eos, greedy, closed loop, every prompt different.  With `--peer`, any server
of OpenAI's API gets the same loads from the same client, right after ours has had them, and a row
of ratios tells how many times better ours is.  The peer serves a model of the same shape, on a
device of its own or beside ours: both then need options that leave each other memory.
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

from benchmarks.schedule.device_model import DEVICES
from benchmarks.shapes import SHAPES, write_model
from benchmarks.shapes.published import BY_SLUG
from benchmarks.shapes.quantization import FORMATS

READY_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class LoadCase:
    """A closed loop of clients; lengths are in tokens."""

    name: str
    clients: int
    input_len: int
    output_len: int
    prompts: int  # requests of all clients together


USUAL = (
    LoadCase("c1", 1, 128, 256, 5),
    LoadCase("c8", 8, 1024, 256, 40),
    LoadCase("c32", 32, 1024, 256, 192),
    LoadCase("c64", 64, 1024, 256, 192),
    LoadCase("c128", 128, 1024, 256, 640),
    LoadCase("c256", 256, 1024, 256, 1024),
    LoadCase("c512", 512, 1024, 256, 1536),
    LoadCase("prefill", 32, 4096, 8, 160),
    LoadCase("long", 8, 16_384, 128, 24),
    LoadCase("prompt", 1, 16_384, 2, 8),
)
SMALL = (
    LoadCase("c1", 1, 128, 256, 8),
    LoadCase("c32", 32, 128, 128, 512),
    LoadCase("c128", 128, 128, 128, 2048),
    LoadCase("c256", 256, 128, 128, 4096),
    LoadCase("c64", 64, 1024, 256, 384),
    LoadCase("prefill", 32, 4096, 8, 480),
    LoadCase("prompt", 1, 16_384, 2, 16),
)


def loads_of(shape: str) -> tuple[LoadCase, ...]:
    return SMALL if shape == "qwen3-0.6b" else USUAL


@contextmanager
def server(
    model: Path, port: int, log: Path, options: list[str], *, simulated: str = ""
) -> Iterator[float]:
    """A server that is ready; yields the seconds from the command to that."""
    module = "benchmarks.schedule.simulated_engine" if simulated else "server.cli.main"
    program = f"import sys; from {module} import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", str(model), "--load-format", "dummy"]
    command += ["--port", str(port), *options]
    environment = dict(os.environ)
    if simulated:
        environment["WAVEFILL_SIMULATED_DEVICE"] = simulated
    with log.open("w") as output:
        began = time.monotonic()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
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


def measure(load: LoadCase, url: str, seed: int, path: Path, options: list[str]) -> dict[str, Any]:
    """The figures of one load as `wavefill bench serve --json` writes them to `path`."""
    command = [sys.executable, "-m", "benchmarks.server.bench_serve", "--ignore-eos"]
    command += ["--base-url", f"{url}/v1", "--vocab-size", "30000"]
    command += ["--concurrency", str(load.clients), "--num-prompts", str(load.prompts)]
    command += ["--input-len", str(load.input_len), "--output-len", str(load.output_len)]
    command += ["--warmup", str(min(load.clients, 8)), "--seed", str(seed), "--json", str(path)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=400)
    if not path.exists():
        raise SystemExit(f"{load.name}: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    figures = json.loads(path.read_text())
    return figures.get("summary", figures)


# Columns: field of the summary, of its percentiles, decimals, and whether larger is better.
COLUMNS = {
    "out tok/s": ("output_tokens_per_s", "", 0, True),
    "total tok/s": ("total_tokens_per_s", "", 0, True),
    "TPOT p50 ms": ("tpot_ms", "p50", 2, False),
    "ITL p50 ms": ("itl_ms", "p50", 2, False),
    "ITL p99 ms": ("itl_ms", "p99", 1, False),
    "TTFT p50 ms": ("ttft_ms", "p50", 0, False),
    "TTFT p99 ms": ("ttft_ms", "p99", 0, False),
}
HEAD = "| load | " + " | ".join(COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|"


def values(summary: dict[str, Any]) -> list[float | None]:
    """The figures of a row; None for what a load has not, such as gaps of answers of one token."""
    found: list[float | None] = []
    for name, field, _, _ in COLUMNS.values():
        value = summary.get(name)
        found.append(value[field] if field and value is not None else value)
    return found


def row(title: str, figures: list[float | None], decimals: list[int]) -> str:
    numbers = [
        "-" if value is None else f"{value:.{places}f}"
        for value, places in zip(figures, decimals, strict=True)
    ]
    return "| " + " | ".join([title, *numbers]) + " |"


def ratios(ours: list[float | None], peer: list[float | None]) -> list[float | None]:
    """How many times better ours is in each column."""
    found: list[float | None] = []
    for own, other, (_, _, _, larger) in zip(ours, peer, COLUMNS.values(), strict=True):
        if not own or not other:
            found.append(None)
        else:
            found.append(own / other if larger else other / own)
    return found


def run_load(load: LoadCase, url: str, peer: str, seed: int, out: Path, options: list[str]) -> None:
    """Print the figures of one load: ours, and the peer's if there is one."""
    decimals = [places for _, _, places, _ in COLUMNS.values()]
    title = f"{load.name} {load.input_len}/{load.output_len}"
    ours = values(measure(load, url, seed, out / f"{load.name}.json", options))
    print(row(title, ours, decimals), flush=True)
    if peer:
        path = out / f"{load.name}.peer.json"
        other = values(measure(load, peer, seed + 1000, path, options))
        print(row("peer", other, decimals))
        print(row("times better", ratios(ours, other), [2] * len(ours)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shapes", nargs="+", choices=sorted({*SHAPES, *BY_SLUG}), metavar="SHAPE")
    parser.add_argument("--only", default="", help="names of loads, with commas")
    parser.add_argument("--format", choices=sorted(FORMATS), default=None, help="of weights")
    parser.add_argument("--layers", type=int, default=0, help="cut the model, to try this out")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--out", type=Path, default=None, help="where figures and logs go")
    parser.add_argument("--serve", default="", help="more options of `wavefill serve`")
    parser.add_argument("--bench", default="", help="more options of `wavefill bench serve`")
    parser.add_argument(
        "--peer",
        type=lambda url: url.rstrip("/").removesuffix("/v1"),
        default="",
        metavar="URL",
        help="another server of OpenAI's API, which gets the same loads",
    )
    parser.add_argument(
        "--simulated", choices=DEVICES, default="", help="no device: simulate steps of qwen3-8b"
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
            model = Path(temporary) / f"{shape}.model"
            write_model(shape, model, layers=args.layers, quantization=args.format)
            options = ["--max-model-len", "32768", *args.serve.split()]
            if args.simulated:
                options += ["--device", "cpu"]
            log = folder / "serve.log"
            with server(model, args.port, log, options, simulated=args.simulated) as ready:
                of = " on a simulated device, which measures no GPU" if args.simulated else ""
                print(f"{shape}{of}: ready after {ready:.1f} s\n{HEAD}", flush=True)
                url = f"http://127.0.0.1:{args.port}"
                for seed, load in enumerate(loads_of(shape), start=int(time.time()) % 100_000):
                    if not selected or load.name in selected:
                        run_load(load, url, args.peer, seed, folder, args.bench.split())


if __name__ == "__main__":
    main()
