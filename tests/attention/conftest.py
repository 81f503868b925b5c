"""What the tests of kernels share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a kernel runs: on a GPU, or on a CPU by Triton's interpreter, where it was chosen."""
    if request.param == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here: TRITON_INTERPRET=1 would interpret them")
    return request.param
