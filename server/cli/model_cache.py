"""The models in the local cache of the Hub: their sizes, when they were used, their removal."""

from __future__ import annotations

import contextlib
import difflib
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server.cli.main import UsageError

UNITS = ((86400 * 365, "year"), (86400 * 30, "month"), (86400, "day"), (3600, "hour"))


@dataclass(frozen=True)
class CachedModel:
    """Times are seconds of the epoch; `servable`: config.json and weights in safetensors."""

    name: str
    bytes: int
    used: float
    downloaded: float
    servable: bool
    folder: str


def scan() -> list[CachedModel]:
    """The models, the last used first."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        cache = scan_cache_dir()
    except (CacheNotFound, ValueError):
        return []
    models = [_model_of(repo) for repo in cache.repos if repo.repo_type == "model"]
    return sorted(models, key=lambda model: -model.used)


def _model_of(repo: Any) -> CachedModel:
    names = [{file.file_name for file in revision.files} for revision in repo.revisions]
    return CachedModel(
        name=repo.repo_id,
        bytes=repo.size_on_disk,
        used=repo.last_accessed,
        downloaded=repo.last_modified,
        servable=any(
            "config.json" in files and any(name.endswith(".safetensors") for name in files)
            for files in names
        ),
        folder=str(repo.repo_path),
    )


def mark_used(folder: Path) -> None:
    """Note that a model is used now: many file systems do not note that a file is read."""
    with contextlib.suppress(OSError):
        file = folder / "config.json"
        os.utime(file, (time.time(), file.stat().st_mtime))


def find(models: Iterable[CachedModel], names: Iterable[str]) -> list[CachedModel]:
    """The models of these names, each once.  Raises UsageError."""
    known = {model.name: model for model in models}
    found: dict[str, CachedModel] = {}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), n=1)
            remedy = f"did you mean {near[0]}?" if near else "`wavefill ls` lists those that are"
            raise UsageError(f"{name} is not in the cache: {remedy}")
        found[name] = known[name]
    return list(found.values())


def size(count: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 2**10:.1f} KiB"


def ago(seconds: float) -> str:
    for unit, name in UNITS:
        count = int(seconds // unit)
        if count:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now" if seconds < 60 else f"{int(seconds // 60)} min ago"
