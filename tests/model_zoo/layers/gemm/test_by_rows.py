"""GemmsByRows: each number of rows has the GEMM of the smallest bucket that covers it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from model_zoo.layers.gemm.by_rows import GemmsByRows
from model_zoo.layers.gemm.implementations import BUCKETS

tables = st.dictionaries(st.sampled_from([*BUCKETS, 128, 512]), st.text("ab", min_size=1))


@given(tables, st.integers(1, 600))
def test_more_rows_than_the_buckets_have_the_next_larger_gemm(table: dict[int, str], rows: int):
    gemms = GemmsByRows[str]()
    gemms.set(table, "fallback")
    larger = [size for size in sorted(table) if size >= rows]
    expected = table[larger[0]] if larger else "fallback"
    if rows <= BUCKETS[-1]:  # one without a GEMM has the fallback, and not that of a larger bucket
        bucket = next(size for size in BUCKETS if size >= rows)
        expected = table.get(bucket, "fallback")
    assert gemms.of(rows) == expected


def test_an_update_keeps_the_other_buckets_and_the_fallback():
    gemms = GemmsByRows[str]()
    gemms.set({1: "one", 8: "eight", 128: "many"}, "fallback")
    gemms.update({8: "better"})
    assert [gemms.of(rows) for rows in (1, 2, 8, 9, 100, 129)] == [
        *("one", "better", "better"),
        *("fallback", "many", "fallback"),
    ]


def test_without_gemms_there_is_none():
    assert GemmsByRows[str]().of(5) is None
