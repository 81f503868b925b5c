"""Marks of tests whose interpreted kernels compute lanes that they do not use."""

from __future__ import annotations

import pytest

# A kernel divides and multiplies lanes that it does not use; the interpreter, by NumPy, says so.
UNUSED_LANES = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
    pytest.mark.filterwarnings("ignore:invalid value encountered"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
]
