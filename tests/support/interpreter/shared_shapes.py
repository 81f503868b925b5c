"""Tensors and their types of one shape share what Triton makes of its numbers.

Interpreted kernels make a tensor at every operation, and Triton wraps each number of its shape as a
constant, and as that constant's type, four times over.  Shapes do not change once they are made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton import language
from triton.language import core
from triton.language.semantic import TritonSemantic

tl: Any = language  # its private parts are used


class Shape(NamedTuple):
    """Of blocks: what tl.block_type and tl.tensor say of a shape."""

    numbers: Any  # tl.tuple of int
    numel: int
    constants: Any  # tl.tuple of constexpr
    constant_numel: Any  # constexpr


def share_shapes() -> None:
    """Replace how tl.block_type and tl.tensor begin, and how types and shapes are compared."""
    block_type, tensor, dtype = tl.block_type, tl.tensor, tl.dtype
    make_block_type, make_tensor, equal = block_type.__init__, tensor.__init__, dtype.__eq__
    by_key: dict[tuple[int, ...], Shape] = {}
    by_id: dict[int, Shape] = {}  # of their tl.tuple of numbers, which live as long as this
    none = make_scalar_shape()

    def begin_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        known = by_id.get(id(shape))
        if known is None:
            key = tuple([n.value if type(n) is tl.constexpr else n for n in shape])
            known = by_key.get(key)
            if known is None or any(type(n) is not int for n in key):
                make_block_type(self, element_ty, shape)
                known = by_key[key] = shape_of(self)
                by_id[id(known.numbers)] = known
        self.element_ty, self.shape, self.numel = element_ty, known.numbers, known.numel

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        known = by_id.get(id(type.shape)) if type.is_block() else none
        if known is None:
            make_tensor(self, handle, type)
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known.constants, known.constant_numel

    block_type.__init__, tensor.__init__ = begin_block_type, begin_tensor
    block_type.name = property(name_of, lambda self, name: None)
    dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    semantic: Any = TritonSemantic
    broadcast = semantic.broadcast_impl_value

    def broadcast_values(self: Any, lhs: Any, rhs: Any) -> Any:
        """Tensors of one shape are returned as they are."""
        if getattr(lhs.type, "shape", None) is getattr(rhs.type, "shape", None):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_values


def name_of(block_type: Any) -> str:
    return f"<{block_type.shape}, {block_type.element_ty}>"


def shape_of(block_type: Any) -> Shape:
    constants = core.tuple([core.constexpr(n) for n in block_type.shape])
    return Shape(block_type.shape, block_type.numel, constants, core.constexpr(block_type.numel))


def make_scalar_shape() -> Shape:
    return Shape(core.tuple([]), 1, core.tuple([]), core.constexpr(1))
