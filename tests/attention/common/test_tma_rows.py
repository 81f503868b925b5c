"""Rows behind a tensor's own."""

from __future__ import annotations

import pytest
import torch

from attention.common.tma_rows import ROWS, empty_with_room, with_rows_behind

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 3, ROWS, ROWS + 5])
def test_a_tensor_with_room_has_its_own_rows_and_memory_for_more(rows: int):
    x = empty_with_room((rows, 4, 16), torch.bfloat16, CPU)
    assert x.shape == (rows, 4, 16) and x.is_contiguous()
    assert with_rows_behind(x.flatten(1), ROWS).shape == (max(rows, ROWS), 64)


@pytest.mark.parametrize(("rows", "first", "expected"), [(6, 0, 6), (6, 4, 2), (20, 4, ROWS)])
def test_rows_behind_end_with_the_memory(rows: int, first: int, expected: int):
    x = torch.arange(rows * 16).view(rows, 16)
    found = with_rows_behind(x[first : first + 1], ROWS)
    assert torch.equal(found, x[first : first + expected])


@pytest.mark.parametrize("shape", [(4, 32), (1, 32)])
def test_one_row_of_a_wider_tensor_is_followed_by_what_lies_there(shape: tuple[int, int]):
    wide = torch.arange(shape[0] * shape[1]).view(shape)
    found = with_rows_behind(wide[:1, :16], ROWS)
    assert torch.equal(found, wide.view(-1, 16)[:ROWS])


def test_a_tensor_that_ends_within_a_row_is_given_whole_rows_alone():
    x = torch.zeros(40)[:16].view(1, 16)
    assert len(with_rows_behind(x, ROWS)) == 2
