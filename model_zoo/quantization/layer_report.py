"""What the linear layers of a loaded model are and which kernels multiply them, for the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from model_zoo.layers.gemm.implementations import MAX_ROWS
from model_zoo.layers.linear import Linear
from model_zoo.model import Model

CUBLAS = "cuBLAS"


def describe_layers(model: Model) -> list[str]:
    """A line for each kind of weight, the most bytes first; none if no layer is quantized.

    `fp8 in rows: 144 layers, 6.95 GB: SkinnyQuantizedGemm; above 64 rows ScaledMM`
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    if all(linear.packed is None for linear in linears):
        return []
    groups: dict[str, list[Linear]] = defaultdict(list)
    for linear in linears:
        scheme = None if linear.packed is None else linear.packed.scheme
        dtype = str(linear.dtype).removeprefix("torch.")
        groups[dtype if scheme is None else scheme.describe(linear.inputs)].append(linear)
    order = sorted(groups, key=lambda name: -_bytes(groups[name]))
    return [_line(name, groups[name]) for name in order]


def _line(name: str, linears: list[Linear]) -> str:
    plural = "s" if len(linears) > 1 else ""
    few = _kernels(linears, range(1, MAX_ROWS + 1))
    many = _kernels(linears, [MAX_ROWS + 1])
    size = f"{_bytes(linears) / 1e9:.2f} GB"
    return f"{name}: {len(linears)} layer{plural}, {size}: {few}; above {MAX_ROWS} rows {many}"


def _bytes(linears: Iterable[Linear]) -> int:
    return sum(linear.operand.nbytes for linear in linears)


def _kernels(linears: Iterable[Linear], rows: Iterable[int]) -> str:
    """The names of what multiplies so many rows."""
    gemms = {linear.gemm_of(count) for linear in linears for count in rows}
    return ", ".join(sorted({CUBLAS if gemm is None else type(gemm).__name__ for gemm in gemms}))
