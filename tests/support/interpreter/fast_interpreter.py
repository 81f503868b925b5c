"""What takes most of the time of Triton's interpreter, made fast: the same bits, sooner.

- A reduction with a `combine_fn` of its own is done an element at a time there, each as a tensor;
  here it is a slice at a time.
- Each call of a device function replaces the functions of `triton.language` again; here it does so
  only if the launch has not replaced them yet.
- The NumPy type of a Triton type is looked up in a dictionary that is made anew at each look.
- Sums and products of integers are computed a second time in 64 bits for an assertion that only
  debugging kernels make.
- Each call of a function of `triton.language` goes through two others.
- Each tensor wraps the numbers of its shape anew, several times; here once a shape.
- Operators look anew at the types of their operands; here once for two types (known_operators.py).
- Floats of few bits, numbers and types of pointers are made anew; here once (known_values.py).

These are private functions of Triton; a version of it that has others keeps its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.interpreter.known_operators import known_operator
from tests.support.interpreter.known_values import remember_values
from tests.support.interpreter.shared_shapes import share_shapes


def use_fast_interpreter() -> None:
    """Replace what this version of Triton has of these."""
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    module: Any = interpreter
    if hasattr(module, "_get_np_dtype"):
        module._get_np_dtype = _remembering(module._get_np_dtype)
    if hasattr(getattr(module, "ReduceOps", None), "generic_reduce"):
        module.ReduceOps.generic_reduce = _reduce_by_slices
    if hasattr(module, "_patch_lang") and hasattr(module, "_LangPatchScope"):
        module._patch_lang = _once_a_launch(module)
    if hasattr(module, "_patch_attr") and hasattr(module, "_patch_builtin"):
        module._patch_attr = _calling_directly(module)
        module._patch_builtin = _listing_once(module)
    semantic: Any = TritonSemantic
    if hasattr(semantic, "binary_op_sanitize_overflow_impl"):
        checked = semantic.binary_op_sanitize_overflow_impl
        semantic.binary_op_sanitize_overflow_impl = _only_in_debugging(checked)
    share_shapes()
    remember_values()


def _remembering(np_type_of: Any) -> Any:
    """`np_type_of(triton_type)`, which a scalar type's name decides."""
    found: dict[str, np.dtype[Any]] = {}

    def remembered(triton_type: Any) -> np.dtype[Any]:
        name = triton_type.scalar.name  # of a block, the type of its elements
        if name not in found:
            found[name] = np_type_of(triton_type)
        return found[name]

    return remembered


def _once_a_launch(module: Any) -> Any:
    """`_patch_lang(fn)`: the first one of a launch returns the scope that the launch restores."""
    patch_lang, languages = module._patch_lang, {id(module.tl), id(module.tl.core)}
    replaced: set[int] = set()
    seen_by: dict[Any, set[int]] = {}

    class Launch:
        def __init__(self, scope: Any) -> None:
            self._scope = scope

        def restore(self) -> None:
            replaced.clear()
            self._scope.restore()

    def patch(fn: Any) -> Any:
        if fn not in seen_by:
            seen_by[fn] = languages.intersection(map(id, fn.__globals__.values()))
        seen = seen_by[fn]
        if seen and seen <= replaced:
            return None
        replaced.update(seen)
        return Launch(patch_lang(fn))

    return patch


def _calling_directly(module: Any) -> Any:
    """`_patch_attr(...)`: what replaces a function calls it without two functions in between."""
    operators: dict[str, Any] = {}  # of tl.tensor

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function, semantic = getattr(member, "__wrapped__", member), module.interpreter_semantic
        if owner is module.tl.tensor:
            if name not in operators:
                operators[name] = known_operator(name, function)
            if operators[name] is not None:
                scope.set_attr(owner, name, operators[name])
                return

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(owner, name, call)

    return patch


def _listing_once(module: Any) -> Any:
    """`_patch_builtin(owner, builder, scope)`: what there is to replace is looked up here."""
    core, patch_builtin = module.tl.core, module._patch_builtin

    class Listed:
        def __init__(self) -> None:
            self.found: list[tuple[str, Any]] = []

        def set_attr(self, owner: Any, name: str, value: Any) -> None:
            self.found.append((name, value))

    owners = (module.tl, core, module.tl.tensor, module.tl.math, core.tensor_descriptor_base)
    listed = {owner: Listed() for owner in owners}
    for owner, each in listed.items():
        patch_builtin(owner, module.interpreter_builder, each)

    def patch(owner: Any, builder: Any, scope: Any) -> None:
        if owner not in listed:
            patch_builtin(owner, builder, scope)
            return
        for name, value in listed[owner].found:
            scope.set_attr(owner, name, value)

    return patch


def _only_in_debugging(check_overflow: Any) -> Any:
    """`check_overflow(self, lhs, rhs, binary_op)`, whose assertion is made there alone."""

    def check(self: Any, *operation: Any) -> None:
        if self.builder.options.debug:
            check_overflow(self, *operation)

    return check


def _reduce_by_slices(self: Any, input: tuple[Any, ...]) -> list[Any]:
    """In the order of the original: ((x0, x1), x2), ... along the axis."""
    whole = self.axis is None
    tensors, axis = self.unravel(input, self.axis)
    types = [tensor.dtype for tensor in tensors]
    slices = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
    rank = len(input[0].handle.data.shape)

    def at(index: int) -> list[Any]:
        pairs = zip(slices, types, strict=True)
        return [self.to_tensor(values[index], type) for values, type in pairs]

    total: Any = at(0)
    for index in range(1, len(slices[0])):
        total = self.combine_fn.fn(*total, *at(index))
        total = total if isinstance(total, tuple) else (total,)
    reduced: list[Any] = []
    for tensor, values, type in zip(total, slices, types, strict=True):
        data = np.asarray(tensor.handle.data).reshape(values.shape[1:])
        if self.keep_dims:
            data = data.reshape((1,) * rank) if whole else np.expand_dims(data, axis)
        elif whole:
            data = data.item()
        reduced.append(self.to_tensor(data, type))
    return reduced
