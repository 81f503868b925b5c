"""Interpreted kernels of Hopper fail where a barrier counts other arrivals than it gets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.interpreter.gluon_interpreter import Kernel
from tests.support.interpreter.gluon_values import Barrier, Barriers


def launch(count: int, arrivals: Sequence[int], copied: int = 0) -> None:
    """Two programs with one barrier of so many arrivals, each of which expects so many bytes."""
    allocated: list[Barrier] = []

    def program() -> None:
        bar = Barriers(1, allocated).index(0)
        bar.count = bar.pending = count
        for more_bytes in arrivals:
            bar.arrive(1, more_bytes)
        if copied:
            bar.copied(copied)

    Kernel(program, [0, 1], allocated)[(2,)]()


def test_whole_phases_are_accepted():
    launch(2, [0, 0])
    launch(2, [64, 64], copied=128)
    launch(1, [])


@pytest.mark.parametrize(
    ("count", "arrivals", "copied"), [(2, [0], 0), (1, [64], 0), (1, [64], 32), (3, [0] * 4, 0)]
)
def test_a_phase_that_is_left_half_done_is_an_error(count: int, arrivals: list[int], copied: int):
    with pytest.raises(AssertionError, match="barrier 0 is left with"):
        launch(count, arrivals, copied)
