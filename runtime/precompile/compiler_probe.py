"""`python -m runtime.precompile.compiler_probe MAJOR MINOR`: whether kernels can be compiled here.

For a GPU of that compute capability, which need not be here; PyTorch is not loaded.  It builds what
a first launch builds: a kernel, by Triton and its assembler, and a module in C, by the compiler of
this machine.  One line of JSON on stdout; anything else than exit code 0 means that it failed, with
the reason in the last line of stderr.
"""

from __future__ import annotations

import json
import sys
import tempfile

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src

BLOCK = 128
C_MODULE = """
#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "wavefill_probe", 0, -1, 0};
PyMODINIT_FUNC PyInit_wavefill_probe(void) { return PyModule_Create(&module); }
"""


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)


def main() -> None:
    major, minor = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        knobs.cache.dir = folder  # what was compiled before says nothing about now
        compile_module_from_src(C_MODULE, "wavefill_probe")
        source = ASTSource(add_one, {"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, {(2,): BLOCK})
        kernel = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32))
    print(json.dumps({"triton": triton.__version__, "bytes": len(kernel.asm["cubin"])}))


if __name__ == "__main__":
    main()
