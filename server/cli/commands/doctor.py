"""`wavefill doctor`: whether this machine can run a server, and what to do where it cannot."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from dataclasses import asdict
from functools import partial

from server.cli.doctor import compute, gpu, system
from server.cli.doctor.check import Check, Result, run_all
from server.cli.main import UsageError
from server.cli.terminal import GREEN, RED, YELLOW, columns, styled

SECONDS = 4.5  # with the start of this command itself, 5
STYLES = {"pass": GREEN, "warn": YELLOW, "fail": RED}
INDENT = 22  # of what was found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check what a server needs of this machine: the driver, PyTorch, the compiler of kernels, "
        "memory, NVLink, the port, the folders of caches and the clock.  Each check passes, warns "
        "or fails, with a remedy.  The exit code is 1 if one fails."
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to try")
    parser.add_argument("--port", default="8000", metavar="N", help="port to try (default: 8000)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=SECONDS,
        metavar="X",
        help=f"a check that takes longer is a warning (default: {SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


def run(args: argparse.Namespace) -> int:
    if not args.seconds > 0:
        raise UsageError(f"--seconds {args.seconds:g}: choose a number above 0")
    if not args.port.isdigit() or not 1 <= int(args.port) <= 65535:
        raise UsageError(f"--port {args.port}: ports run from 1 to 65535")
    results = run_all(checks(args.host, int(args.port)), args.seconds)
    failed = any(result.status == "fail" for result in results.values())
    if args.json:
        entries = [{"check": name, **asdict(result)} for name, result in results.items()]
        print(json.dumps({"ok": not failed, "checks": entries}, indent=2))
    else:
        for name, result in results.items():
            print(shown(name, result, columns() if sys.stdout.isatty() else 0))
        print(summary(results))
    return 1 if failed else 0


def checks(host: str, port: int) -> list[Check]:
    gpus = gpu.Gpus()
    found = [
        Check("python", system.python),
        Check("driver", partial(gpu.driver, gpus)),
        Check("torch", partial(compute.torch, gpus)),
        Check("triton", partial(compute.triton, gpus)),
        Check("memory", system.memory),
        Check("GPU memory", partial(gpu.memory, gpus)),
        Check("NVLink", partial(gpu.nvlink, gpus)),
        Check("GPU clock", partial(gpu.gpu_clock, gpus)),
        Check("port", partial(system.port, host, port)),
        Check("open files", system.open_files),
    ]
    for name, folder, variable, wanted in system.cache_folders():
        run = partial(system.cache_folder, folder, variable, wanted)
        found.append(Check(f"cache: {name}", run))
    return [*found, Check("clock", system.clock)]


def shown(name: str, result: Result, width: int) -> str:
    """A line, and one for the remedy; wrapped where `width` is not 0."""
    head = f"{styled(result.status, STYLES[result.status], sys.stdout)}  {name:<{INDENT - 6}}"
    lines = _wrapped(result.found, width)
    if result.remedy:
        lines += _wrapped(f"-> {result.remedy}", width)
    return head + f"\n{' ' * INDENT}".join(lines)


def _wrapped(text: str, width: int) -> list[str]:
    if width < 2 * INDENT:
        return [text]
    return textwrap.wrap(text, width - INDENT, break_long_words=False, break_on_hyphens=False)


def summary(results: dict[str, Result]) -> str:
    counts = {status: 0 for status in STYLES}
    for result in results.values():
        counts[result.status] += 1
    if counts["fail"]:
        return f"{counts['fail']} failed: a server will not work as it is"
    if counts["warn"]:
        return f"a server can run; {counts['warn']} to look at"
    return "a server can run"
