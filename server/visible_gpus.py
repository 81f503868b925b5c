"""CUDA_VISIBLE_DEVICES as Wavefill reads it: with ranges, which CUDA itself does not know."""

from __future__ import annotations

import re
from collections.abc import Mapping

VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
RANGE = re.compile(r"(\d+)-(\d+)")
MAX_INDEX = 1024  # no host has so many GPUs


class VisibleDevicesError(ValueError):
    """The value of the variable cannot be read."""


def listed(environment: Mapping[str, str]) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES, one for each GPU; None if it is not set.

    CUDA sees nothing from the first entry on that is no GPU, such as -1.
    Raises VisibleDevicesError for a range that has no GPU.
    """
    value = environment.get(VISIBLE_DEVICES)
    if value is None:
        return None
    found: list[str] = []
    for entry in filter(None, map(str.strip, value.split(","))):
        several = RANGE.fullmatch(entry)
        if several is not None:
            found += map(str, _indices(value, int(several[1]), int(several[2])))
        elif entry.startswith("-"):
            break
        else:
            found.append(entry)
    return found


def _indices(value: str, first: int, last: int) -> range:
    if last < first:
        raise VisibleDevicesError(
            f"{VISIBLE_DEVICES}={value}: the range {first}-{last} has no GPU: write "
            f"{last}-{first}, or the GPUs one by one with commas"
        )
    if last >= MAX_INDEX:
        raise VisibleDevicesError(
            f"{VISIBLE_DEVICES}={value}: the range {first}-{last} goes beyond {MAX_INDEX - 1}"
        )
    return range(first, last + 1)


def expanded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable without ranges, for a process that uses CUDA; nothing where it has none.

    Raises VisibleDevicesError.
    """
    entries = environment.get(VISIBLE_DEVICES, "").split(",")
    if not any(RANGE.fullmatch(entry.strip()) for entry in entries):
        return {}
    return {VISIBLE_DEVICES: ",".join(listed(environment) or [])}
