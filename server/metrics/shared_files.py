"""The files in which several API processes count, so that each of them can sum all.

prometheus_client maps them into its memory, where a page for which the disk has no room ends the
process with SIGBUS.  So the launcher writes them in full before it starts API processes, and one
that is started again goes on in the files of the one that died.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

KINDS = ("counter", "histogram")  # of our metrics that API processes count
# More than all routes and codes make, and what a series takes without the name of the model.
MAX_SERIES, SERIES_BYTES = 3000, 300


def reserve(folder: Path, processes: int, name: str) -> None:
    """Make the files of API processes 0 to `processes` - 1; `name` is that of the served model.

    Raises OSError, if there is no room for them.
    """
    folder.mkdir()
    zeros = bytes(MAX_SERIES * (SERIES_BYTES + len(name.encode())))
    for index in range(processes):
        for kind in KINDS:
            (folder / f"{kind}_{index}.db").write_bytes(zeros)


def count_as(index: int) -> None:
    """Let this process count in the files of this API process; before any metric is made."""
    from prometheus_client import values  # which the launcher does not need

    untyped: Any = values
    untyped.ValueClass = untyped.MultiProcessValue(lambda: index)
