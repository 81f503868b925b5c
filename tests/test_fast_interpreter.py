"""The interpreter that tests use reduces in the order of Triton's own."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)
ROWS, COLUMNS = 4, 8


@triton.jit
def digits(a, b, c, d):
    """Of two values each: no order of the values but the given one has this result."""
    return a * 3 + c, b * 5 - d


@triton.jit
def reduce_kernel(x_ptr, y_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr, COUNT: tl.constexpr):
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + rows * 8 + columns)
    first, second = tl.reduce((x, x + 1), AXIS, digits, keep_dims=KEEP)  # type: ignore[arg-type]
    places = tl.arange(0, COUNT)
    tl.store(y_ptr + places, tl.reshape(first, (COUNT,)))
    tl.store(y_ptr + COUNT + places, tl.reshape(second, (COUNT,)))


def reduced(values: list[int]) -> tuple[int, int]:
    first, second = values[0], values[0] + 1
    for value in values[1:]:
        first, second = first * 3 + value, second * 5 - (value + 1)
    return first, second


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_tuples_are_reduced_one_after_another_along_an_axis(axis: int, keep: bool):
    x = torch.randint(-3, 9, (ROWS, COLUMNS))
    lines = x.T.tolist() if axis == 0 else x.tolist()
    y = torch.zeros(2, len(lines), dtype=torch.int64)
    kernel: Any = reduce_kernel
    kernel[(1,)](x, y, axis, keep, len(lines))
    assert list(zip(*y.tolist(), strict=True)) == [reduced(line) for line in lines]


@triton.jit
def digit(a, b):
    return a * 3 + b


@triton.jit
def reduce_all_kernel(x_ptr, y_ptr):
    x = tl.load(x_ptr + tl.arange(0, 4)[:, None] * 8 + tl.arange(0, 8)[None, :])
    tl.store(y_ptr, tl.reduce(x, None, digit))


def test_values_are_reduced_over_all_axes():
    x = torch.randint(-3, 3, (ROWS, COLUMNS))
    y = torch.zeros(1, dtype=torch.int64)
    reduce_all_kernel[(1,)](x, y)
    assert y.item() == reduced(x.flatten().tolist())[0]


@triton.jit
def shifted(x):
    return tl.cumsum(x, 0) + tl.sum(x, 0)


@triton.jit
def sums_kernel(x_ptr, y_ptr):
    """Its functions call those of Triton, which see another module."""
    places = tl.arange(0, 8)
    tl.store(y_ptr + places, shifted(shifted(tl.load(x_ptr + places))))


def test_functions_that_call_each_other_are_interpreted_in_every_launch():
    for _ in range(2):
        x = torch.arange(COLUMNS)
        y = torch.zeros_like(x)
        sums_kernel[(3,)](x, y)
        once = x.cumsum(0) + x.sum()
        assert torch.equal(y, once.cumsum(0) + once.sum())


@triton.jit
def shapes_kernel(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    x = tl.load(x_ptr + rows * COLUMNS + columns)
    tl.static_assert(x.shape[0] == ROWS and x.shape[1] == COLUMNS and x.numel == ROWS * COLUMNS)
    tl.static_assert(rows.shape[1] == 1 and x.T.shape[0] == COLUMNS and len(tl.sum(x).shape) == 0)
    y = (x * 2147483647 + rows).to(tl.float32) + columns + tl.sum(x)
    tl.store(y_ptr + rows * COLUMNS + columns, y)


@pytest.mark.parametrize(("rows", "columns"), [(4, 8), (8, 4), (8, 8), (1, 2)])
def test_rows_columns_and_numbers_go_together_and_integers_wrap(rows: int, columns: int):
    x = torch.randint(-9, 9, (rows, columns), dtype=torch.int32)
    y = torch.zeros(rows, columns)
    kernel: Any = shapes_kernel
    kernel[(1,)](x, y, rows, columns)
    wrapped = (x * 2147483647 + torch.arange(rows, dtype=torch.int32)[:, None]).float()
    assert torch.equal(y, wrapped + torch.arange(columns) + x.sum())


@triton.jit
def arange_kernel(y_ptr, COUNT: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, 8), tl.zeros((COUNT,), tl.float32))


@pytest.mark.parametrize("count", [3, 8.0, 4])
def test_shapes_that_triton_refuses_are_refused_each_time(count: float):
    """No power of two, no integer, and none that fits the pointers."""
    kernel: Any = arange_kernel
    kernel[(1,)](torch.zeros(8), 8)
    for _ in range(2):
        with pytest.raises(Exception, match=r"power of 2|must have type|ncompatible"):
            kernel[(1,)](torch.zeros(8), count)


def test_types_are_equal_by_what_they_are():
    assert tl.block_type(tl.int32, [8, 4]) == tl.block_type(tl.int32, [8, 4])
    assert tl.block_type(tl.int32, [8, 4]) != tl.block_type(tl.int32, [4, 8])
    assert tl.block_type(tl.int32, [8]) != tl.block_type(tl.uint32, [8])
    assert tl.int32 == tl.dtype("int32") != tl.int64 and tl.int32 != 32
    assert str(tl.block_type(tl.int32, [8])).endswith("int32>")
