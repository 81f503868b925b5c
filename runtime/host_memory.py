"""free_host_bytes: memory of this host, or of the container, that could be allocated now."""

from __future__ import annotations

import os
import re
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")  # of the container


def free_host_bytes(cgroup: Path = CGROUP) -> int:
    free = 1 << 62
    try:
        meminfo = Path("/proc/meminfo").read_text()
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
        if found:
            free = int(found[1]) * 1024
    except OSError:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        if limit != "max":
            free = min(free, int(limit) - used + _cached_bytes(cgroup))
    except (OSError, ValueError):
        pass
    return max(free, 0)


def _cached_bytes(cgroup: Path) -> int:
    """Page cache in the container's memory, such as weights that were read: reclaimed on demand."""
    found = re.search(r"^inactive_file (\d+)$", (cgroup / "memory.stat").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0
