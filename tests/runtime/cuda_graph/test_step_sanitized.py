"""compute-sanitizer finds nothing in the kernels of a step; those of attention have their own."""

from __future__ import annotations

import pytest

from tests.support.kernels.compute_sanitizer import check_sanitized

PLAIN = ["layers", "split_k", "sample", "constrained"]


# Streams and attention for Hopper are not for racecheck, which does not know how Triton hands
# tasks to groups of warps, nor for initcheck, which does not see what the copy engine writes.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "names"),
    [
        ("memcheck", [*PLAIN, "stream", "delta_net"]),
        ("memcheck", ["step"]),
        ("racecheck", PLAIN),
        ("initcheck", PLAIN),
    ],
    ids=["memcheck-kernels", "memcheck-step", "racecheck", "initcheck"],
)
def test_sanitizer_finds_nothing_in_a_step(tool: str, names: list[str]) -> None:
    check_sanitized(tool, "tests.support.kernels.sanitized_step", names)
