"""What an operator does with two tensors is found once for their types and shapes.

At each `x + y` Triton looks at both types, casts and broadcasts the operands, and chooses an
operation.  Here it does so with the first operands of such types and shapes, or of such a type and
such a number.  If one call of NumPy makes the same bits of them, it makes those of the next ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from triton import language
from triton.runtime.interpreter import TensorHandle, interpreter_semantic

tl: Any = language  # its private parts are used
semantic: Any = interpreter_semantic
NUMBERS = (int, float, bool)
COMPARISONS: dict[str, Any] = {
    "__lt__": np.less,
    "__le__": np.less_equal,
    "__gt__": np.greater,
    "__ge__": np.greater_equal,
    "__eq__": np.equal,
    "__ne__": np.not_equal,
}
OPERATORS: dict[str, Any] = {
    "__add__": np.add,
    "__sub__": np.subtract,
    "__mul__": np.multiply,
    "__truediv__": np.divide,
    "__and__": np.bitwise_and,
    "__or__": np.bitwise_or,
    "__xor__": np.bitwise_xor,
}
REFLECTED = {f"__r{name[2:]}": function for name, function in OPERATORS.items()}


class Operation(NamedTuple):
    """Of a tensor on the left, and one or a number on the right; of a reflected one vice versa."""

    function: Any  # of NumPy
    left_dtype: Any  # to which the tensor is cast; None: it stays
    right_dtype: Any
    number: Any  # on the right, as an array; None: a tensor is there
    reflected: bool
    dtype: Any  # of the result's values
    type: Any  # of the result
    kept: Any  # what is known by its id has to live as long as this

    def __call__(self, left: Any, right: Any) -> Any:
        return tl.tensor(TensorHandle(self.values(left, right), self.dtype), self.type)

    def values(self, left: Any, right: Any) -> Any:
        if self.left_dtype is not None:
            left = semantic.cast(left, self.left_dtype)
        first, second = left.handle.data, self.number
        if second is None:
            if self.right_dtype is not None:
                right = semantic.cast(right, self.right_dtype)
            second = right.handle.data
        if self.reflected:
            first, second = second, first
        return self.function(first, second)


def known_operator(name: str, method: Callable[..., Any]) -> Callable[..., Any] | None:
    """What replaces the method of tl.tensor, which takes `_semantic`; None: it stays."""
    reflected = name in REFLECTED
    function = (COMPARISONS | OPERATORS | REFLECTED).get(name)
    if function is None:
        return None
    known: dict[Any, Operation | None] = {}
    tensor, constexpr = tl.tensor, tl.constexpr

    def operate(left: Any, right: Any, **named: Any) -> Any:
        if type(right) is constexpr:
            right = right.value
        # The result's handle has that of the left, which after a comparison is the type of what
        # was compared.
        of_left = id(left.dtype), id(left.shape), id(left.handle.dtype)
        if type(right) is tensor:
            key = *of_left, id(right.dtype), id(right.shape), id(right.handle.dtype)
        elif type(right) in NUMBERS:
            key = *of_left, type(right), right
        else:
            return method(left, right, _semantic=semantic)
        operation = known.get(key)
        if operation is not None:
            return operation(left, right)
        result = method(left, right, _semantic=semantic)
        if key not in known:
            known[key] = _operation(function, reflected, left, right, result)
        return result

    return operate


def _operation(function: Any, reflected: bool, left: Any, right: Any, result: Any) -> Any:
    """What has this result by one call of the function; None: there is nothing."""
    is_number = type(right) in NUMBERS
    right_dtype, right_shape = (None, None) if is_number else (right.dtype, right.shape)
    right_handle = None if is_number else right.handle.dtype
    if left.dtype.is_ptr():
        if function is not np.add or reflected:
            return None
        function, dtype = _address(left.dtype.element_ty), None
        number = semantic.to_tensor(right) if is_number else None
    elif is_number or not right_dtype.is_ptr():
        # What is compared has its own type first, whatever the type of the left is.
        operand = semantic.to_tensor(right) if function in COMPARISONS.values() else right
        options = False, False, True, function is np.divide
        dtype = semantic.binary_op_type_checking_impl(left, operand, *options)[0].dtype
        number = None
        if is_number and operand is right:
            number = semantic.scalar_constant(right, dtype)
        elif is_number:
            number = semantic.cast(operand, dtype)
    else:
        return None
    operation = Operation(
        function,
        None if left.dtype is dtype else dtype,
        None if right_dtype is dtype else dtype,
        None if number is None else number.handle.data,
        reflected,
        result.handle.dtype,
        result.type,
        (left.dtype, left.shape, left.handle.dtype, right_dtype, right_shape, right_handle),
    )
    wanted, found = result.handle.data, operation.values(left, right)
    same = found.dtype == wanted.dtype and found.shape == wanted.shape
    return operation if same and found.tobytes() == wanted.tobytes() else None


def _address(element_type: Any) -> Callable[[Any, Any], Any]:
    """A pointer plus an offset."""
    nbytes = max(1, element_type.primitive_bitwidth // 8)
    return lambda pointer, offset: pointer + nbytes * offset.astype(np.uint64)
