"""The bar of `wavefill plan`: its width, and that every part is seen in proportion."""

from __future__ import annotations

import re

import pytest

from runtime.startup.memory_bar import bar_width, memory_bar, shares


@pytest.mark.parametrize("sizes", [[1, 1, 1], [1, 0, 10**12], [7], [10**12, 1, 1, 1, 1, 5]])
def test_the_parts_fill_the_width_and_none_disappears(sizes: list[int]) -> None:
    columns = shares(sizes, 76)
    assert sum(columns) == 76
    assert all((count > 0) == (size > 0) for count, size in zip(columns, sizes, strict=True))


def test_the_parts_are_in_proportion() -> None:
    assert shares([50, 25, 25], 40) == [20, 10, 10]


def test_letters_show_the_parts_without_colours() -> None:
    parts = [("weights", 2), ("state", 0), ("KV", 1), ("unused", 1)]
    assert memory_bar(parts, 8, colour=False) == "  [WWWWKK..]"


def test_colours_change_nothing_of_the_width() -> None:
    parts = [("weights", 2), ("KV", 1), ("unused", 1)]
    drawn = memory_bar(parts, 8, colour=True)
    assert "\033[30;44mW   \033[0m" in drawn
    assert re.sub(r"\033\[[\d;]*m", "", drawn) == "  [W   K ..]"


def test_where_no_person_looks_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    assert bar_width() == 0
