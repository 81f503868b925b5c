"""Kernels compiled before the start are those that are launched later; none runs meanwhile."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.config import ConfigError
from runtime.precompile.compiling import check_cache
from tests.support.paths import ROOT

pytest.importorskip("triton", reason="kernels are compiled by Triton, which is not here")

NAMES = ("planner", "write_kv d128 bf16", "write_kv d64 bf16")
PROGRAM = f"""
import json
from tests.support.kernels.compile_for_hopper import CompileOnly
from tests.support.kernels.shipped_kernels import SHIPPED
from triton import knobs
from triton.runtime.driver import driver

from runtime.precompile.compiling import compiling_only

compiled = []
knobs.compilation.listener = lambda src, **rest: compiled.append(src.name)
device = CompileOnly()
load, loaded = device.load_binary, []

def load_and_tell(name, *rest):
    loaded.append(name)
    return name, *load(name, *rest)[1:]

device.load_binary = load_and_tell
driver.set_active(device)
with compiling_only(threads=2):
    for name in {NAMES}:
        SHIPPED[name]()
    launched_inside = len(device.launched)
ready_inside = len(compiled), len(loaded)
for name in {NAMES}:
    SHIPPED[name]()
ready = len(compiled), len(loaded)
print(json.dumps([launched_inside, ready_inside, ready, len(device.launched)]))
"""
BROKEN = """
import triton
from tests.support.kernels.compile_for_hopper import CompileOnly
from tests.support.kernels.shipped_kernels import tensor
from triton.runtime.driver import driver

from runtime.precompile.compiling import compiling_only

@triton.jit
def broken(pointer):
    not_defined_anywhere(pointer)

@triton.jit
def optional_one(pointer):
    not_defined_either(pointer)

@triton.jit
def needed_later(pointer):
    not_there(pointer)

driver.set_active(CompileOnly())
try:
    with compiling_only(threads=2):
        broken[(1,)](tensor(4))
except Exception as error:
    print(error)
with compiling_only(threads=2) as optional:
    with optional():
        optional_one[(1,)](tensor(4))
    print("entered again")
try:
    optional_one[(1,)](tensor(4))
except Exception as error:
    print("at its launch:", error)
try:
    with compiling_only(threads=2) as optional:
        with optional():
            needed_later[(1,)](tensor(4))
        needed_later[(1,)](tensor(4))
except Exception as error:
    print("needed:", error)
"""
LAUNCHERS = """
import time
from concurrent.futures import ThreadPoolExecutor

from triton.backends.nvidia import driver
from triton.runtime import build

from runtime.precompile.compiling import compiling_only

SOURCE = '''
#include <Python.h>
static PyObject *launch(PyObject *self, PyObject *none) { return PyLong_FromLong(%d); }
static PyMethodDef methods[] = {{"launch", launch, METH_NOARGS, ""}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "launcher", 0, -1, methods};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&module); }
'''
built, run = [], build._build

def build_slowly(name, source, *rest):
    built.append(open(source).read())
    time.sleep(0.3)
    return run(name, source, *rest)

build._build = build_slowly

def of(number):
    return driver.compile_module_from_src(src=SOURCE % number, name="launcher")

with compiling_only(threads=2), ThreadPoolExecutor(4) as threads:
    modules = list(threads.map(of, (0, 1, 0, 1)))
    modules += [of(number) for number in (0, 1)]
print([module.launch() for module in modules], len(built))
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: this one may interpret kernels, and must go on to."""
    file = folder / "program.py"
    file.write_text(program)
    environment = os.environ | {
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": str(ROOT),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(file)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_what_is_called_is_compiled_and_loaded_once_and_launched_only_afterwards(tmp_path: Path):
    done = run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr
    inside, ready_inside, ready, launched = json.loads(done.stdout.splitlines()[-1])
    assert inside == 0 and launched == len(NAMES)
    assert ready == ready_inside == [len(NAMES), len(NAMES)]
    assert list((tmp_path / "cache").rglob("*.cubin"))


def test_a_kernel_that_does_not_compile_raises(tmp_path: Path):
    done = run(BROKEN, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "not_defined_anywhere" in done.stdout.split("entered again")[0]


def test_an_optional_kernel_that_does_not_compile_raises_when_it_is_launched(tmp_path: Path):
    done = run(BROKEN, tmp_path)
    assert done.returncode == 0, done.stderr
    after = done.stdout.split("entered again")[1]
    assert "at its launch:" in after and "not_defined_either" in after


def test_a_kernel_that_is_optional_in_one_place_and_needed_in_another_raises(tmp_path: Path):
    done = run(BROKEN, tmp_path)
    assert "not_there" in done.stdout.partition("needed:")[2], done.stderr


def test_a_kernel_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "cache"))
    check_cache()
    assert (tmp_path / "new" / "cache").is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"kept in .*file: File exists: set TRITON_CACHE_DIR"):
        check_cache()


@pytest.mark.parametrize("name", ["prefill.prefill_hopper", "decode.decode_hopper"])
def test_a_kernel_compiled_on_a_few_pages_serves_any_number_of_them(name: str):
    kernel = getattr(importlib.import_module(f"attention.{name}"), f"_{name.split('.')[1]}")
    specialized = [param.name for param in kernel.params if not param.do_not_specialize]
    assert "q_token" in specialized and "num_pages" not in specialized


def test_a_launcher_is_built_once_and_does_not_replace_another_one(tmp_path: Path):
    """Four threads ask for two of them at once."""
    done = run(LAUNCHERS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 1, 0, 1, 0, 1] 2\n"
