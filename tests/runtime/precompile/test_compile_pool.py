"""What another process compiles is what the engine looks for, and nothing is lost if it dies."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from msgspec.structs import replace

from benchmarks.shapes import SHAPES
from runtime.config import EngineConfig
from runtime.precompile import pool, predict, preimport
from runtime.precompile.predict import PredictedKernels, predicted_kernels
from tests.support.paths import ROOT

pytest.importorskip("triton", reason="kernels are compiled by Triton, which is not here")

# _merge and _combine share helpers: what they are kept by would depend on which is met first.
NAMES = ("write_kv d128 bf16", "decode d128 bf16", "prefill d128 bf16")
PROGRAM = """
import json
import sys
from tests.support.kernels.compile_for_hopper import CompileOnly
from tests.support.kernels.shipped_kernels import SHIPPED
from triton import knobs
from triton.runtime.driver import driver

from runtime.precompile import pool, preimport
from runtime.precompile.compiling import compiling_only
from runtime.config import EngineConfig

names = json.loads(sys.argv[1])
pool.COMMAND = json.loads(sys.argv[2]) or pool.COMMAND
kept = {}
knobs.compilation.listener = lambda src, cache_hit, **rest: kept.setdefault(src.name, cache_hit)
driver.set_active(CompileOnly())
begun = preimport.begin(EngineConfig(model="/nowhere"), ["/dev/null"])
with compiling_only(begun, threads=2):
    for name in names:
        SHIPPED[name]()
print(json.dumps(kept))
"""
PREDICTION = """
import json
import sys
from functools import partial
from pathlib import Path

from runtime.precompile.pool import Compilers
from runtime.config import EngineConfig
from runtime.precompile.predict import predicted_kernels

process = Compilers()
config = EngineConfig(model=sys.argv[1], kv_dtype=sys.argv[2])
for prediction in predicted_kernels(config, (9, 0)):
    if "_skinny_gemm" not in prediction.kernels:
        process.begin(prediction)

from tests.support.kernels.compile_for_hopper import CompileOnly
from tests.support.kernels.shipped_attention import *
from tests.support.kernels.shipped_kernels import *
from attention.common import dependent_launch
from attention.kv_pool import FP8
from runtime.precompile.compiling import compiling_only
from triton import knobs
from triton.runtime.driver import driver

dependent_launch.can_depend = lambda device: True
for answered in list(process._pending.values()):
    assert answered.wait(100)
kept = {}
knobs.compilation.listener = lambda src, cache_hit, **rest: kept.setdefault(src.name, cache_hit)
driver.set_active(CompileOnly())
step, tiles = ShippedStep(128, BF16), tile_plan(tile_spec(128, 128), 128)
pages, scale = step.k, None
if config.kv_dtype == "fp8_e4m3":
    pages, scale = step.k.to(FP8), tensor(step.k.shape[1], dtype=torch.float32)
with compiling_only(threads=2):
    inputs = KernelInputs(
        step.q, pages, pages, step.table, step.out, scale=0.1, k_scale=scale, v_scale=scale
    )
    prefill_hopper(inputs, tiles, overlap=True)
    logits, last_token = tensor(ROWS, 151936), tensor(ROWS, dtype=torch.int64)
    numbers, usable = tensor(ROWS, dtype=INT32), tensor(ROWS, dtype=torch.int8)
    state = SamplerState(ROWS, 151936, META)
    sample(logits, numbers, numbers, state, last_token, numbers, usable)
process.close()
print(json.dumps(kept))
"""
FORK_POOL = """
import json
import os
import select
import time

from runtime.precompile.worker import CompileRequest, ForkPool

answers = []
forks = ForkPool(2, answers.append)
forks.add(0, CompileRequest(lambda: time.sleep(0.5), kernels=("slow",)))
forks.add(1, CompileRequest(lambda: None, "slow"))
forks.add(2, CompileRequest(lambda: os.kill(os.getpid(), 9), "bad"))
forks.add(3, CompileRequest(lambda: None, "quick"))
while forks.ends:
    for end in select.select(forks.ends, [], [])[0]:
        forks.take(end)
print(json.dumps(answers))
"""
ONE_ANSWER = "import sys; sys.stdin.buffer.read(8); sys.stdout.buffer.write(bytes(4))"


def compiled(
    folder: Path, names: tuple[str, ...] = NAMES, command: tuple[str, ...] = ()
) -> dict[str, bool]:
    """Kernels, and whether they were there when the engine looked for them."""
    return run(folder, PROGRAM, json.dumps(names), json.dumps(command))


def run(folder: Path, program: str, *arguments: str) -> Any:
    """What the program prints last."""
    file = folder / "program.py"
    file.write_text(program)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(file), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_all_kernels_are_there_when_the_engine_looks_for_them_whichever_is_first(tmp_path: Path):
    kept = compiled(tmp_path)
    assert len(kept) >= len(NAMES) and all(kept.values()), kept
    # In another order, by threads: what would be compiled again would not be there.
    assert all(compiled(tmp_path, NAMES[::-1], ("/nowhere",)).values())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("/nowhere",), id="cannot be started", marks=pytest.mark.slow),
        pytest.param((sys.executable, "-c", "pass"), id="dies at once", marks=pytest.mark.slow),
        pytest.param((sys.executable, "-c", ONE_ANSWER), id="dies later"),
    ],
)
def test_without_the_process_the_engine_compiles(tmp_path: Path, command: tuple[str, ...]):
    kept = compiled(tmp_path, ("write_kv d128 bf16", "write_kv d64 bf16"), command)
    assert kept == {"_write_kv": False}


def test_who_cannot_even_ask_waits_no_longer_than_who_gets_no_answer(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(pool, "MAX_SECONDS", 0.5)
    monkeypatch.setattr(pool, "_request", lambda make: bytes(40_000))  # two fill the pipe
    process = pool.Compilers(sys.executable, "-c", "import time; time.sleep(600)")
    askers = [Thread(target=process.compile, args=(lambda: None,), daemon=True) for _ in range(4)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join(20)
    assert not any(asker.is_alive() for asker in askers)
    process.close()


def test_what_is_begun_after_the_end_is_sent_to_no_other_file_of_that_number():
    process = pool.Compilers(sys.executable, "-c", "import sys; sys.stdin.buffer.read()")
    process.close()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    process._requests = writer  # whatever has been opened since
    process.begin(PredictedKernels(gc.enable, ()))
    with pytest.raises(BlockingIOError):
        os.read(reader, 1)
    os.close(reader)
    os.close(writer)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def of_group(group: int) -> list[str]:
    """The commands of the processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            command, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            state, _, process_group, *_ = rest.split()
            if int(process_group) == group and state != "Z":
                found.append(command)
    return found


def test_what_a_prediction_has_started_ends_with_the_process():
    process = pool.Compilers()
    group = process._process.pid
    process.begin(PredictedKernels(partial(os.system, "sleep 100"), ()))
    wait_until(lambda: "sleep" in of_group(group), 30)
    process.close()
    wait_until(lambda: not of_group(group), 5)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_what_takes_longest_is_there_before_anybody_has_asked_for_it(tmp_path: Path, kv_dtype: str):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    kept = run(tmp_path, PREDICTION, str(tmp_path), kv_dtype)
    assert {"_prefill_hopper", "_merge", "filter_rows", "finish_rows"} < kept.keys()
    assert all(kept.values()), kept


def test_a_kernel_that_is_already_being_compiled_is_waited_for_and_a_job_that_dies_is_answered(
    tmp_path: Path,
):
    assert run(tmp_path, FORK_POOL) == [2, 3, 0, 1]


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 4),
        ({"deterministic": True}, 0),
        ({"dtype": "float32"}, 0),
        ({"attention": "mha"}, 3),
        ({"kv_dtype": "fp8_e4m3"}, 4),
    ],
)
def test_only_kernels_that_will_be_used_are_predicted(
    tmp_path: Path, changes: dict[str, object], number: int, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["qwen3-8b"]))
    config = replace(EngineConfig(model=str(tmp_path)), **changes)
    monkeypatch.setattr(predict, "processes", lambda: 12)
    assert len(predicted_kernels(config, (9, 0))) == number
    monkeypatch.setattr(predict, "processes", lambda: 0)
    assert len(predicted_kernels(config, (9, 0))) == max(0, number - 1)
    assert predicted_kernels(config, (8, 0)) == []


def test_no_process_is_started_where_there_is_no_driver():
    assert preimport.begin(EngineConfig(model="/nowhere"), ["/nowhere"]) is None
