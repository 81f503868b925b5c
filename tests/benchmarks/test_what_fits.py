"""The table of which model fits which GPU."""

from __future__ import annotations

import re

import pytest

from benchmarks.memory.what_fits import row
from benchmarks.shapes import FAMILIES
from tests.support.paths import ROOT

TABLE = (ROOT / "docs" / "models.md").read_text("utf-8")


def test_every_family_has_a_row_in_the_documentation():
    assert re.findall(r"^\| ([\w-][^|]*?) \|", TABLE, re.M)[1:] == list(FAMILIES)


@pytest.mark.parametrize(
    "name", ["Qwen3-8B", "Gemma 3 12B", "gpt-oss-20b", "Qwen3.5-35B-A3B", "Qwen3-VL-4B"]
)
def test_a_row_of_the_documentation_is_what_is_computed(name: str):
    assert row(name) in TABLE.splitlines()
