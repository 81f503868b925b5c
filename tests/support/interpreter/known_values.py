"""Values that the interpreter makes anew each time are made once.

- Floats of 8 and 16 bits are converted by a table of all of them, which Triton fills: it takes each
  number apart into sign, exponent and significand.
- Tensors of one number share its array, which is only read.
- Pointers to elements of one type have one type.
- What a function returns as it came is seen before it looks for other cases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

tl: Any = language  # its private parts are used


def remember_values() -> None:
    """Replace what this version of Triton has of these."""
    module: Any = interpreter
    semantic: Any = TritonSemantic
    if hasattr(module, "_convert_float"):
        module._convert_float = _by_tables(module._convert_float)
    if hasattr(semantic, "scalar_constant"):
        semantic.scalar_constant = _sharing_arrays(semantic.scalar_constant)
    if hasattr(tl, "str_to_ty"):
        tl.str_to_ty = _of_pointers(tl.str_to_ty)
    if hasattr(semantic, "cast"):
        semantic.cast = _of_other_types(semantic.cast)
    if hasattr(tl.core, "_unwrap_if_constexpr"):
        tl.core._unwrap_if_constexpr = _knowing_tensors(tl.core._unwrap_if_constexpr)
    if hasattr(module, "_validate_np_data_size"):
        module.TensorHandle.__init__ = _checking_sizes_once(module)


def _by_tables(convert: Callable[..., Any]) -> Callable[..., Any]:
    """`convert(values, from_type, to_type, rounding)`, which returns bits."""
    tables: dict[Any, Any] = {}

    @wraps(convert)
    def converted(values: Any, from_type: Any, to_type: Any, rounding: Any) -> Any:
        bits = from_type.primitive_bitwidth
        if from_type is tl.float32 and to_type is tl.bfloat16 and rounding is None:
            return _first_half(values, convert)
        if bits > 16:
            return convert(values, from_type, to_type, rounding)
        key = from_type.name, to_type.name, rounding
        if key not in tables:
            every = np.arange(1 << bits, dtype=f"uint{bits}")
            tables[key] = convert(every, from_type, to_type, rounding)
        return tables[key][values.view(f"uint{bits}")]

    return converted


def _first_half(values: Any, convert: Callable[..., Any]) -> Any:
    """float32 -> bfloat16, of which Triton's conversion of subnormal numbers differs."""
    words = np.ascontiguousarray(values).view(np.uint32)
    if (((words & 0x7F800000) == 0) & ((words & 0x007FFFFF) != 0)).any():
        return convert(values, tl.float32, tl.bfloat16, None)
    return (words >> 16).astype(np.uint16).reshape(values.shape)


def _sharing_arrays(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make(self, number, dtype)`."""
    known: dict[Any, Any] = {}

    def constant(self: Any, number: Any, dtype: Any) -> Any:
        if number != number:
            return make(self, number, dtype)
        key = type(number), number, id(dtype)
        if key not in known:
            handle = make(self, number, dtype).handle
            known[key] = handle.data, handle.dtype, dtype  # the last lives as long as its id
        data, handle_dtype, _ = known[key]
        return tl.tensor(interpreter.TensorHandle(data, handle_dtype), dtype)

    return constant


def _of_pointers(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """`type_of(name, c)`."""
    known: dict[str, Any] = {}

    def remembered(name: str, c: Any) -> Any:
        if not isinstance(name, str) or not name.startswith("*") or c is not None:
            return type_of(name, c)
        if name not in known:
            known[name] = type_of(name, c)
        return known[name]

    return remembered


def _of_other_types(cast: Callable[..., Any]) -> Callable[..., Any]:
    """`cast(self, tensor, type, rounding)`."""

    def converted(self: Any, tensor: Any, type: Any, *rounding: Any, **named: Any) -> Any:
        if tensor.dtype is type.scalar:
            return tensor
        return cast(self, tensor, type, *rounding, **named)

    return converted


def _knowing_tensors(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    plain = {tl.tensor, int, float, bool, str, type(None)}
    return lambda value: value if type(value) in plain else unwrap(value)


def _checking_sizes_once(module: Any) -> Callable[..., None]:
    """TensorHandle's, whose check fails where NumPy's elements have more bits than Triton's."""
    is_valid, valid = module._validate_np_data_size, set[tuple[int, str]]()

    def begin(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        size = data.itemsize, dtype.name
        if size not in valid:
            if not is_valid(data, dtype):
                raise ValueError(f"elements of {data.itemsize} bytes for the type {dtype}")
            valid.add(size)

    return begin
