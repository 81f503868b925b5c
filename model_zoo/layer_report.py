"""What the linear layers of a loaded model are and which kernels multiply them, for the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from model_zoo.layers.gemm.implementations import MAX_ROWS
from model_zoo.layers.linear import Linear
from model_zoo.model import Model

DEQUANTIZED = "DequantizedGemm"


def describe_layers(model: Model) -> list[str]:
    """A line for each kind of weight, the most bytes first; none if no layer is quantized.

    `fp8 in rows: 144 layers, 6.95 GB: DequantGemm, ScaledMM; above 64 rows ScaledMM`
    """
    groups = _groups(model)
    linears = [linear for each in groups.values() for linear in each]
    if all(linear.packed is None and not linear.is_dequantized for linear in linears):
        return []
    return [_line(name, groups[name]) for name in sorted(groups, key=lambda n: -_bytes(groups[n]))]


def slow_layers(model: Model) -> list[str]:
    """What runs no faster than unquantized weights, and why: a sentence for each kind of weight."""
    found: list[str] = []
    for name, linears in _groups(model).items():
        layers = f"{len(linears)} layers of {name}"
        if linears[0].is_dequantized:
            found.append(
                f"{layers} take the memory and the time of unquantized ones: no kernel multiplies "
                "them as they are stored, or fused layers differ (`wavefill formats` says which)"
            )
        elif DEQUANTIZED in _kernels(linears, [MAX_ROWS + 1]):
            found.append(
                f"{layers} are dequantized for each step of more than {MAX_ROWS} tokens, which "
                "then takes longer than with unquantized weights"
            )
    return found


def _groups(model: Model) -> dict[str, list[Linear]]:
    """The linear layers by the kind of their weights."""
    groups: dict[str, list[Linear]] = defaultdict(list)
    for linear in model.modules():
        if isinstance(linear, Linear):
            groups[_kind(linear)].append(linear)
    return groups


def _kind(linear: Linear) -> str:
    if linear.packed is not None:
        return linear.packed.scheme.describe(linear.inputs)
    dtype = str(linear.dtype).removeprefix("torch.")
    return f"{dtype}, dequantized when loaded" if linear.is_dequantized else dtype


def _line(name: str, linears: list[Linear]) -> str:
    plural = "s" if len(linears) > 1 else ""
    few = _kernels(linears, range(1, MAX_ROWS + 1))
    many = _kernels(linears, [MAX_ROWS + 1])
    size = f"{_bytes(linears) / 1e9:.2f} GB"
    return f"{name}: {len(linears)} layer{plural}, {size}: {few}; above {MAX_ROWS} rows {many}"


def _bytes(linears: Iterable[Linear]) -> int:
    return sum(
        linear.outputs * linear.inputs * linear.dtype.itemsize
        if linear.packed is None
        else linear.packed.weight.nbytes
        for linear in linears
    )


def _kernels(linears: Sequence[Linear], rows: Iterable[int]) -> str:
    """The names of what multiplies so many rows."""
    default = "cuBLAS" if linears[0].device.type == "cuda" else "PyTorch"
    gemms = {linear.gemm_of(count) for linear in linears for count in rows}
    return ", ".join(sorted({default if gemm is None else type(gemm).__name__ for gemm in gemms}))
