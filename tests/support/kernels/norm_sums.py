"""How the compiled norms of an H100 add the squares of a row: by which threads, in which order.

    python -m tests.support.kernels.norm_sums

prints a JSON list of [columns, name of the kernel, layouts of its sums, their instructions], for
add_rms_norm and add_rms_norm_quantize.  Needs what compile_for_hopper.py needs.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import triton
from triton.runtime.driver import driver

from attention.common import dependent_launch
from model_zoo.layers.kernels import add_rms_norm as plain
from model_zoo.layers.quantized_gemm import quantize_rows as quantizing
from tests.support.kernels.compile_for_hopper import CompileOnly
from tests.support.kernels.shipped_attention import tensor

COLUMNS = (1024, 2048, 4096, 5120)


def record_kernels(function: Any) -> list[Any]:
    """The compiled kernels of the function's launches from now on."""
    found: list[Any] = []
    run = function.run

    def recorded(*args: Any, **options: Any) -> Any:
        found.append(run(*args, **options))
        return found[-1]

    function.run = recorded
    return found


def sums(kernel: Any, columns: int) -> tuple[list[str], list[str]]:
    """-> (layouts of the rows that are added up, arithmetic before threads exchange their sums)."""
    ttgir, ptx = kernel.asm["ttgir"], kernel.asm["ptx"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ttgir, re.MULTILINE))
    block = triton.next_power_of_2(columns)
    names = re.findall(rf"\}}\) : \(tensor<{block}xf32, (#\w+)>\) -> f32", ttgir)
    own = ptx[: ptx.index("shfl")]
    return [layouts[name] for name in names], re.findall(r"(?:fma|mul|add)[.\w]*\.f32", own)


def main() -> None:
    dependent_launch.can_depend = lambda device: True
    driver.set_active(CompileOnly())
    kernels = {
        "plain": record_kernels(plain._add_rms_norm),
        "quantizing": record_kernels(quantizing._add_rms_norm_quantize),
    }
    found: list[tuple[int, str, list[str], list[str]]] = []
    for columns in COLUMNS:
        x = tensor(64, columns)
        for post_weight in (None, x[0]):
            plain.add_rms_norm(x, x, x[0], 1e-6, post_weight=post_weight)
            for kind in ("row", "block", "int8", "int8 zeros"):
                quantizing.add_rms_norm_quantize(x, x, x[0], 1e-6, kind, post_weight=post_weight)
        for name, made in kernels.items():
            found += [(columns, name, *sums(kernel, columns)) for kernel in made]
            made.clear()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
