"""Memory that nothing has written is NaN, as it may be on a GPU; else it is often zero."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    if torch.cuda.is_available():  # whose libraries have other rules for deterministic algorithms
        yield
        return
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan() and torch.zeros(1).new_empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)
