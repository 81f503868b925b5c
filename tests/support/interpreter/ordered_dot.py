"""The interpreter's tl.dot with sums in the order of the columns, like a GPU's.

NumPy's library computes rows of one matmul in different ways, which round differently: no GPU does.
"""

from __future__ import annotations

from typing import Any

import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def _create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> TensorHandle:
    total = d.data.copy()
    for column in range(a.data.shape[1]):
        total += a.data[:, column, None].astype(total.dtype) * b.data[None, column]
    return TensorHandle(total, d.dtype.scalar)


@pytest.fixture
def ordered_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _create_dot)
