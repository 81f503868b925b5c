"""Pinned host memory: what the driver is told, and what happens if it refuses."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from runtime.executor.pinned_memory import PAGE, pinned


class Driver:
    """The two functions of the CUDA driver, with a list of their calls."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []

        def register(
            address: ctypes.c_void_p, num_bytes: ctypes.c_size_t, flags: ctypes.c_uint
        ) -> int:
            self.calls.append(("register", num_bytes.value))
            return code

        def unregister(address: ctypes.c_void_p) -> int:
            # Memory that is unmapped would end this process.
            self.calls.append(("unregister", ctypes.string_at(address.value or 0, 1)[0]))
            return 0

        self.cuMemHostRegister_v2 = register
        self.cuMemHostUnregister = unregister


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    with patch("ctypes.CDLL", lambda name: driver):
        yield driver


def test_memory_is_unpinned_once_while_it_is_still_mapped(driver: Driver) -> None:
    tensor = pinned((3, 1000), torch.float32, what="these numbers")
    assert tensor.shape == (3, 1000) and tensor.dtype == torch.float32
    view = tensor[0]
    tensor.view(torch.uint8).fill_(7)
    del tensor
    assert driver.calls == [("register", 3 * PAGE)], "a view still uses the memory"
    del view
    assert driver.calls == [("register", 3 * PAGE), ("unregister", 7)]


def test_memory_that_is_not_pinned_is_warned_of_and_used(caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(code=2)
    with patch("ctypes.CDLL", lambda name: driver):
        tensor = pinned((8,), torch.int64, what="these numbers")
        tensor.fill_(3)
        assert tensor.sum() == 24
        del tensor
    assert driver.calls == [("register", PAGE)]
    assert caplog.messages == [
        "these numbers: 4.0 KiB of memory cannot be pinned (CUDA error 2), so that copies hold up "
        "steps: check the limit of locked memory (ulimit -l)"
    ]
