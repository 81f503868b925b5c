"""tl.minimum and tl.maximum of a number and NaN are the number, as on a GPU.

Triton's interpreter returns NaN, so that a kernel that hides NaN of a broken checkpoint on a GPU
shows it there.  With PropagateNan.ALL both return NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def use_minimum_of_gpus() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    builder: Any = InterpreterBuilder
    builder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    builder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
