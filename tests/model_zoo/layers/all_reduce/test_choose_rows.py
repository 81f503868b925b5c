"""Up to how many rows norms compute the sums: by times."""

from __future__ import annotations

import pytest

from model_zoo.layers.all_reduce.choose_rows import fastest_rows, sizes
from model_zoo.layers.all_reduce.symmetric_buffers import rows_of_buffers


@pytest.mark.parametrize(
    ("fused", "chosen"),
    [
        ({1: 3.0, 8: 4.0, 128: 9.0}, 128),
        ({1: 3.0, 8: 4.0, 128: 10.0}, 8),  # no faster
        ({1: 3.0, 8: 11.0, 128: 9.0}, 1),  # and none above a size with which it is not
        ({1: 12.0, 8: 4.0, 128: 9.0}, 0),
    ],
)
def test_the_kernel_is_used_up_to_the_first_size_with_which_it_is_not_faster(
    fused: dict[int, float], chosen: int
):
    timed: list[int] = []

    def library(rows: int) -> float:
        timed.append(rows)
        return 10.0

    assert fastest_rows(fused, fused.__getitem__, library) == chosen
    assert timed == list(fused)[: len(timed)]


@pytest.mark.parametrize(
    ("most", "measured"),
    [
        (2048, [1, 8, 32, 128, 256, 512, 1024, 2048]),
        (1000, [1, 8, 32, 128, 256, 512, 1000]),
        (128, [1, 8, 32, 128]),
        (8, [1, 8]),
        (1, [1]),
    ],
)
def test_the_largest_number_of_rows_is_measured(most: int, measured: list[int]):
    assert list(sizes(most)) == measured


def test_buffers_have_the_rows_of_a_step_or_as_many_as_fit():
    import torch

    assert rows_of_buffers(512, 4096, torch.bfloat16, 2, 32 << 20) == 512
    assert rows_of_buffers(8192, 4096, torch.bfloat16, 2, 32 << 20) == 4096
    assert rows_of_buffers(8192, 8192, torch.bfloat16, 2, 32 << 20) == 2048
    assert rows_of_buffers(8192, 8192, torch.bfloat16, 5, 32 << 20) == 512
