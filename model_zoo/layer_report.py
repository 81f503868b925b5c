"""What the linear layers of a loaded model are and which kernels multiply them, for the log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from model_zoo.layers.gemm.implementations import MAX_ROWS
from model_zoo.layers.linear import Linear
from model_zoo.layers.moe.expert_stack import ExpertStack
from model_zoo.model import Model

DEQUANTIZED = "dequantize then cuBLAS"  # DequantizeThenCublas.name; its module needs Triton
UNPACKED = (
    "take the memory and the time of unquantized ones: no kernel multiplies them as they are "
    "stored, or fused layers differ (`wavefill formats` says which)"
)


def describe_layers(model: Model) -> list[str]:
    """A line for each kind of weight, the most bytes first; none if no layer is quantized.

    `fp8 in rows: 144 layers, 6.95 GB: dequantize in registers; above 64 rows fp8 tensor cores;
    activations quantized by norm, silu_mul`
    """
    groups, stacks = _groups(model), _stacks(model)
    layers = [layer for each in (*groups.values(), *stacks.values()) for layer in each]
    if all(layer.packed is None and not layer.is_dequantized for layer in layers):
        return []
    return [
        *(_stack_line(name, found) for name, found in stacks.items()),
        *(_line(name, groups[name]) for name in sorted(groups, key=lambda n: -_bytes(groups[n]))),
    ]


def slow_layers(model: Model) -> list[str]:
    """What runs no faster than unquantized weights, and why: a sentence for each kind of weight."""
    found = [
        f"{len(stacks)} stacks of experts' layers of {name} {UNPACKED}"
        for name, stacks in _stacks(model).items()
        if stacks[0].is_dequantized
    ]
    for name, linears in _groups(model).items():
        layers = f"{len(linears)} layers of {name}"
        if linears[0].is_dequantized:
            found.append(f"{layers} {UNPACKED}")
        elif slow := [rows for rows in _many(linears) if DEQUANTIZED in _kernels(linears, [rows])]:
            steps = "each step" if slow == _many(linears)[-len(slow) :] else "some steps"
            found.append(
                f"{layers} are dequantized for {steps} of more than {slow[0] - 1} tokens: that "
                "takes longer than unquantized weights would"
            )
    return found


def _groups(model: Model) -> dict[str, list[Linear]]:
    """The linear layers by the kind of their weights."""
    groups: dict[str, list[Linear]] = defaultdict(list)
    for linear in model.modules():
        if isinstance(linear, Linear):
            groups[_kind(linear)].append(linear)
    return groups


def _stacks(model: Model) -> dict[str, list[ExpertStack]]:
    """The stacked layers of experts by the kind of their weights."""
    stacks: dict[str, list[ExpertStack]] = defaultdict(list)
    for experts in model.experts():
        for stack in (experts.gate_up, experts.down):
            stacks[_kind(stack)].append(stack)
    return stacks


def _kind(linear: Linear | ExpertStack) -> str:
    if linear.packed is not None:
        return linear.packed.scheme.describe(linear.inputs)
    dtype = str(linear.dtype).removeprefix("torch.")
    return f"{dtype}, dequantized when loaded" if linear.is_dequantized else dtype


def _stack_line(name: str, stacks: list[ExpertStack]) -> str:
    """`fp8 in rows: 96 stacks of 128 experts' layers, 29.45 GB: grouped GEMMs`"""
    size = f"{sum(stack.nbytes for stack in stacks) / 1e9:.2f} GB"
    layers = f"{len(stacks)} stacks of {stacks[0].experts} experts' layers"
    return f"{name}: {layers}, {size}: grouped GEMMs"


def _line(name: str, linears: list[Linear]) -> str:
    plural = "s" if len(linears) > 1 else ""
    few = ", ".join(_kernels(linears, range(1, MAX_ROWS + 1)))
    many = ", ".join(_kernels(linears, _many(linears)))
    size = f"{_bytes(linears) / 1e9:.2f} GB"
    kernels = f"{few}; above {MAX_ROWS} rows {many}{_quantized_by(linears)}"
    return f"{name}: {len(linears)} layer{plural}, {size}: {kernels}"


def _quantized_by(linears: list[Linear]) -> str:
    """`; activations quantized by norm, silu_mul`: the kernels before some of the layers."""
    numbers = (*range(1, MAX_ROWS + 1), *_many(linears))
    found = {
        linear.after
        for linear in linears
        if linear.after is not None and any(map(linear.input_scales, numbers))
    }
    return f"; activations quantized by {', '.join(sorted(found))}" if found else ""


def _many(linears: Sequence[Linear]) -> list[int]:
    """One number of rows, ascending, of each GEMM that a layer has for more than MAX_ROWS."""
    return sorted({rows for linear in linears for rows in linear.sizes_above(MAX_ROWS)})


def _bytes(linears: Iterable[Linear]) -> int:
    return sum(
        linear.outputs * linear.inputs * linear.dtype.itemsize
        if linear.packed is None
        else linear.packed.scheme.nbytes(linear.outputs, linear.inputs)
        for linear in linears
    )


def _kernels(linears: Sequence[Linear], rows: Iterable[int]) -> list[str]:
    """The names of what multiplies so many rows."""
    default = "cuBLAS" if linears[0].device.type == "cuda" else "PyTorch"
    gemms = {linear.gemm_of(count) for linear in linears for count in rows}
    return sorted({default if gemm is None else gemm.name for gemm in gemms})
