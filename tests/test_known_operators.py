"""The operators and conversions that the tests' interpreter remembers have the bits of Triton's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as language
from triton.runtime import interpreter

from tests.support.interpreter.known_operators import (
    COMPARISONS,
    OPERATORS,
    REFLECTED,
    known_operator,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are compiled here"
)
tl: Any = language
semantic: Any = interpreter.interpreter_semantic
DTYPES = ("i1", "i8", "u8", "i32", "u32", "i64", "fp16", "bf16", "fp32", "fp64")
SHAPES = [((), ()), ((), (4,)), ((4, 1), (1, 4)), ((4, 4), (4, 4)), ((4,), (2, 4)), ((2, 4), (4,))]
NUMBERS = (0, 1, -3, 255, 1 << 31, True, -0.0, 2.5, 1e300, float("inf"), float("nan"))


@triton.jit
def kernel():
    tl.static_assert(True)


@pytest.fixture(autouse=True)
def launched() -> Iterator[None]:
    """Inside, triton.language is what it is in an interpreted kernel."""
    module: Any = interpreter
    scope = module._patch_lang(kernel.fn)
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        scope.restore()


ORIGINALS: dict[str, Any] = {
    name: getattr(tl.tensor, name).__wrapped__ for name in (COMPARISONS | OPERATORS | REFLECTED)
}


def random_tensor(dtype: Any, shape: tuple[int, ...], noise: np.random.Generator) -> Any:
    """Of any bits."""
    module: Any = interpreter
    size = shape or (1,)
    if dtype.is_ptr():
        values = noise.integers(1 << 40, 1 << 47, size, dtype=np.uint64)
    elif dtype is tl.int1:
        values = noise.integers(0, 2, size).astype(bool)
    else:
        of_numpy = module._get_np_dtype(dtype)
        several = noise.integers(0, 256, (*size, of_numpy.itemsize), dtype=np.uint8)
        values = several.view(of_numpy)[..., 0]
    handle = interpreter.TensorHandle(values, dtype)
    return tl.tensor(handle, tl.block_type(dtype, list(shape)) if shape else dtype)


def outcome(operate: Any, left: Any, right: Any) -> Any:
    try:
        result = operate(left, right, _semantic=semantic)
    except Exception as error:
        return type(error), str(error)
    values = result.handle.data
    return values.tobytes(), values.dtype, values.shape, result.handle.dtype, str(result.type)


@pytest.mark.parametrize("name", ORIGINALS)
def test_operators_have_the_bits_types_and_errors_of_tritons(name: str):
    noise = np.random.default_rng(len(name))
    original = ORIGINALS[name]
    operate: Any = known_operator(name, original)

    def check(left: Any, shape: tuple[int, ...], right: Any, other: tuple[int, ...] = ()) -> None:
        for _ in range(2):  # the first time Triton's own is called
            x = random_tensor(left, shape, noise)
            y = random_tensor(right, other, noise) if isinstance(right, tl.dtype) else right
            assert outcome(operate, x, y) == outcome(original, x, y), (left, shape, right, other)

    dtypes = [tl.str_to_ty(each, None) for each in (*DTYPES, "*bf16", "*i8")]
    for (left, right), (shape, other) in itertools.product(
        itertools.product(dtypes, dtypes), SHAPES
    ):
        check(left, shape, right, other)
    for left, shape, number in itertools.product(dtypes, ((), (4, 4)), NUMBERS):
        check(left, shape, number)


CONVERSIONS = [
    *itertools.product(("fp8e4nv", "fp8e5"), ("fp16", "bf16", "fp32")),
    *itertools.product(("fp16", "bf16", "fp32"), ("fp8e4nv", "fp8e5")),
    ("bf16", "fp32"),
    ("fp32", "bf16"),
]


@pytest.mark.parametrize(("name", "to"), CONVERSIONS)
def test_floats_are_converted_to_the_bits_of_tritons(name: str, to: str):
    module: Any = interpreter
    noise = np.random.default_rng(0)
    from_type, to_type = tl.str_to_ty(name, None), tl.str_to_ty(to, None)
    of_numpy = module._get_np_dtype(from_type)
    every = noise.integers(0, 256, (999, 3, of_numpy.itemsize), np.uint8).view(of_numpy)
    some = [every[..., 0]]
    if name == "fp32":
        some = [noise.normal(size=(64, 3)).astype(np.float32) * scale for scale in (1, 1e-40)]
    for values, rounding in itertools.product(some, (None, module._ir.ROUNDING_MODE.RTNE)):
        options = np.broadcast_to(values, (2, *values.shape)), from_type, to_type, rounding
        found, wanted = module._convert_float(*options), module._convert_float.__wrapped__(*options)
        assert np.array_equal(found, wanted) and found.dtype == wanted.dtype


def test_a_number_is_of_the_type_that_is_asked_for():
    for number in (0, 1, 1.0, True, -0.0, 0.0, 2, float("nan")):
        for dtype in (tl.int32, tl.float32, tl.int64, tl.float16, tl.int1):
            for _ in range(2):
                try:
                    found = semantic.scalar_constant(number, dtype)
                except ValueError:
                    assert number != number
                    continue
                assert found.dtype is dtype and found.handle.data.shape == (1,)
                assert found.handle.data.dtype == np.dtype(interpreter._get_np_dtype(dtype))


def test_a_result_has_the_type_of_its_own_operands_handles():
    """That of a comparison is what was compared: floats at first, then integers."""
    noise = np.random.default_rng(0)
    both = known_operator("__and__", ORIGINALS["__and__"])
    assert both is not None
    for dtype in (tl.float32, tl.int32, tl.float32):
        numbers = random_tensor(dtype, (), noise)
        compared = ORIGINALS["__lt__"](numbers, numbers, _semantic=semantic)
        wanted = ORIGINALS["__and__"](compared, compared, _semantic=semantic)
        assert both(compared, compared).handle.dtype == wanted.handle.dtype
