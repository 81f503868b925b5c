"""GemmsByRows: the GEMM of a layer for each number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

from model_zoo.layers.gemm.implementations import BUCKETS

Impl = TypeVar("Impl")


class GemmsByRows(Generic[Impl]):
    """The GEMM depends on the number of rows only, so that a CUDA graph can capture it."""

    def __init__(self) -> None:
        self._gemms: dict[int, Impl] = {}  # by the largest number of rows, ascending
        self._few: list[Impl | None] = []  # indexed by the number of rows
        self.fallback: Impl | None = None

    def set(self, gemms: Mapping[int, Impl], fallback: Impl | None = None) -> None:
        """GEMMs by the largest number of rows each is for; a bucket covers smaller numbers too.

        fallback  for buckets of BUCKETS that are not in gemms, and for more rows than gemms have
        """
        self._gemms, self.fallback = dict(sorted(gemms.items())), fallback
        self._few = [fallback]
        for bucket in BUCKETS:
            self._few += [gemms.get(bucket, fallback)] * (bucket + 1 - len(self._few))

    def update(self, gemms: Mapping[int, Impl]) -> None:
        """Set those of some buckets, and keep the others."""
        self.set({**self._gemms, **gemms}, self.fallback)

    def all(self) -> list[Impl | None]:
        """That of any number of rows."""
        return [*self._gemms.values(), self.fallback]

    def sizes_above(self, rows: int) -> list[int]:
        """Numbers of rows, ascending: the smallest of each GEMM for more than so many rows."""
        return [1 + rows, *(1 + most for most in self._gemms if most > rows)]

    def of(self, rows: int) -> Impl | None:
        if rows < len(self._few):
            return self._few[rows]
        return next((gemm for most, gemm in self._gemms.items() if rows <= most), self.fallback)
