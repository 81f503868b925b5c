"""The interpreter of processes that tests start: that of tests/conftest.py."""

from __future__ import annotations

import os


def interpret_sooner() -> None:
    """Where kernels are interpreted."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support.interpreter.fast_interpreter import use_fast_interpreter
        from tests.support.interpreter.minimum_of_nan import use_minimum_of_gpus

        use_fast_interpreter()
        use_minimum_of_gpus()
