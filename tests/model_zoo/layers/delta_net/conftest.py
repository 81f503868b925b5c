"""Memory that nothing has written is NaN, and the Hopper kernels are interpreted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.interpreter.gluon_interpreter import interpreted

HOPPER = "model_zoo.layers.delta_net.hopper"


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """As it may be on a GPU; else it is often zero."""
    if torch.cuda.is_available():  # whose libraries have other rules for deterministic algorithms
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan() and torch.zeros(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def hopper_kernels() -> Iterator[None]:
    """A GPU runs the kernels themselves."""
    if torch.cuda.is_available():
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("these kernels are for Hopper")
        yield
        return
    with (
        interpreted("_local", f"{HOPPER}.chunks", f"{HOPPER}.local"),
        interpreted("_scan", *(f"{HOPPER}.{name}" for name in ("chunks", "scan"))),
    ):
        yield
