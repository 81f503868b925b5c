"""Interprets the straight-line PTX of kernels' inline assembly, over tensors of 32-bit words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
HALVES = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def run_ptx(ptx: str, inputs: Sequence[Tensor], outputs: int) -> list[Tensor]:
    """-> the outputs, of 16 or 32 bits, in int64.

    inputs  int64, the numbers of $outputs, $outputs + 1 and so on; only their 32 bits count
    """
    registers = {f"${outputs + i}": word & MASK for i, word in enumerate(inputs)}
    for operation, operands in _instructions(ptx):
        if operands[0].startswith("{"):
            _unpack(registers, operands)
            continue
        read = [_value(registers, x) for x in operands[1:]]
        registers[operands[0]] = _run(operation, read) & MASK
    return [torch.as_tensor(registers[f"${i}"]) for i in range(outputs)]


@lru_cache
def _instructions(ptx: str) -> list[tuple[str, list[str]]]:
    """(operation, operands) of each line."""
    found: list[tuple[str, list[str]]] = []
    body = ptx.strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (line.strip() for line in body.split(";"))):
        if not line.startswith(".reg"):
            operation, rest = line.split(None, 1)
            found.append((operation, [x.strip() for x in re.findall(r"\{[^}]*\}|[^,]+", rest)]))
    return found


def _unpack(registers: dict[str, Tensor], operands: list[str]) -> None:
    low, high = (x.strip() for x in operands[0].strip("{}").split(","))
    word = _value(registers, operands[1])
    assert isinstance(word, Tensor)
    registers[low], registers[high] = word & 0xFFFF, word >> 16


def _value(registers: dict[str, Tensor], operand: str) -> Tensor | int:
    return int(operand, 0) if operand[0].isdigit() else registers[operand]


def _run(operation: str, x: Sequence[Tensor | int]) -> Tensor:
    name, *types = operation.split(".")
    if operation == "cvt.rn.bf16x2.f32":
        high, low = (_float(a).bfloat16().view(torch.int16).long() & 0xFFFF for a in x)
        return high << 16 | low
    if types[-1] in HALVES:
        return _of_halves(name, HALVES[types[-1]], x)
    known: dict[str, Callable[..., Tensor]] = {
        "mov.b32": lambda a: torch.as_tensor(a),
        "and.b32": lambda a, b: a & b,
        "mul.f32": lambda a, b: (_float(a) * _float(b)).view(torch.int32).long(),
        "shl.b32": lambda a, n: a << n,
        "shr.b32": lambda a, n: a >> n,
        "shf.l.wrap.b32": lambda low, high, n: ((high << 32 | low) << n) >> 32,
        "lop3.b32": _lop3,
    }
    return known[operation](*x)


def _float(word: Tensor | int) -> Tensor:
    return torch.as_tensor(word).to(torch.int32).view(torch.float32)


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: int) -> Tensor:
    """Bit 4 a + 2 b + c of the table, for each bit."""
    found = torch.zeros((), dtype=torch.int64)
    for i in range(8):
        if table >> i & 1:
            parts = (x if i >> n & 1 else ~torch.as_tensor(x) for x, n in ((a, 2), (b, 1), (c, 0)))
            first, second, third = parts
            found = found | (first & second & third)
    return found


def _of_halves(name: str, dtype: torch.dtype, x: Sequence[Tensor | int]) -> Tensor:
    compute = {"sub": torch.sub, "mul": torch.mul, "fma": lambda a, b, c: a * b + c}[name]
    exact = compute(*(_halves(v, dtype).double() for v in x))  # of codes of weights
    return exact.to(dtype).view(torch.int32).squeeze(-1).long() & MASK


def _halves(word: Tensor | int, dtype: torch.dtype) -> Tensor:
    """[..., 2], the low one first."""
    return torch.as_tensor(word).to(torch.int32).unsqueeze(-1).view(dtype)
