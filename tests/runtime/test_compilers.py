"""What another process compiles is what the engine looks for, and nothing is lost if it dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime import early

pytest.importorskip("triton", reason="kernels are compiled by Triton, which is not here")

TESTS = Path(__file__).parent.parent
# _merge and _combine share helpers: what they are kept by would depend on which is met first.
NAMES = ("write_kv d128 bf16", "decode d128 bf16", "prefill d128 bf16")
PROGRAM = """
import json
import sys
from compile_for_hopper import CompileOnly
from shipped_kernels import SHIPPED
from triton import knobs
from triton.runtime.driver import driver

from runtime import compilers, early
from runtime.compiling import compiling_only

names = json.loads(sys.argv[1])
compilers.COMMAND = json.loads(sys.argv[2]) or compilers.COMMAND
kept = {}
knobs.compilation.listener = lambda src, cache_hit, **rest: kept.setdefault(src.name, cache_hit)
driver.set_active(CompileOnly())
early.begin(["/dev/null"])
with compiling_only(threads=2):
    for name in names:
        SHIPPED[name]()
print(json.dumps(kept))
"""
ONE_ANSWER = "import sys; sys.stdin.buffer.read(8); sys.stdout.buffer.write(bytes(4))"


def compiled(
    folder: Path, names: tuple[str, ...] = NAMES, command: tuple[str, ...] = ()
) -> dict[str, bool]:
    """Kernels, and whether they were there when the engine looked for them."""
    file = folder / "program.py"
    file.write_text(PROGRAM)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}",
    }
    environment.pop("TRITON_INTERPRET", None)
    arguments = [sys.executable, str(file), json.dumps(names), json.dumps(command)]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_kernels_are_there_when_the_engine_looks_for_them_whichever_is_first(tmp_path: Path):
    kept = compiled(tmp_path)
    assert len(kept) >= len(NAMES) and all(kept.values()), kept
    # In another order, by threads: what would be compiled again would not be there.
    assert all(compiled(tmp_path, NAMES[::-1], ("/nowhere",)).values())


@pytest.mark.parametrize(
    "command",
    [("/nowhere",), (sys.executable, "-c", "pass"), (sys.executable, "-c", ONE_ANSWER)],
    ids=["cannot be started", "dies at once", "dies later"],
)
def test_without_the_process_the_engine_compiles(tmp_path: Path, command: tuple[str, ...]):
    kept = compiled(tmp_path, ("write_kv d128 bf16", "write_kv d64 bf16"), command)
    assert kept == {"_write_kv": False}


def test_no_process_is_started_where_there_is_no_driver():
    early.begin(["/nowhere"])
    assert early.begun_compilers() is None
