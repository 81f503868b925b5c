"""EngineCounts: the engine's counters since the server started, which never decrease.

An API process has the counters of the last message it received, which may be a second older than
what another API process has exported.  And a restarted engine counts from 0.
"""

from __future__ import annotations

import fcntl
import operator
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from msgspec.structs import astuple

from runtime.stats import Stats

# Counters among the fields of Stats -> help.
GRAPH_COUNTERS = {
    "steps_without_graph": "Steps that ran without a CUDA graph.",
    "steps_in_larger_graph": "Steps in a larger CUDA graph, until there is one of their size.",
    "graphs_captured_while_decoding": "CUDA graphs captured while sequences decode: always 0.",
}

IMAGE_COUNTERS = {
    "images_encoded": "Images that the encoder has run for.",
    "image_cache_hits": "Images of prompts whose features were cached.",
    "image_encoder_seconds": "Time that the image encoder took, in seconds.",
}


class _Seen(msgspec.Struct, frozen=True):
    """The highest counters that any API process has seen."""

    epoch: int = 0
    now: Stats = Stats()  # of the engine of this epoch
    before: Stats = Stats()  # of those before it, together


class EngineCounts:
    """One for each API process; those of one server share a file in `folder`."""

    def __init__(self, folder: str = "", engine: int = 0) -> None:
        """`folder` is "" for the only API process of a server; engine: its index."""
        self._path = Path(folder, f"engine-{engine}") if folder else None
        self._seen = _Seen()
        self._lock = Lock()

    @property
    def restarts(self) -> int:
        """Engines that became ready after the first one; those that never did are counted later."""
        return max(0, self._seen.epoch - 1)

    def take(self, epoch: int | None, stats: Stats) -> Stats:
        """The counters of all engines so far; `stats` are those of `epoch`, None without an engine.

        The gauges among the fields are meaningless.  Any thread may call this.
        """
        with self._lock, self._shared():
            seen = self._seen
            if epoch is not None and epoch > seen.epoch:
                seen = _Seen(epoch, stats, _combined(operator.add, seen.before, seen.now))
            elif epoch == seen.epoch:
                seen = msgspec.structs.replace(seen, now=_combined(max, seen.now, stats))
            self._seen = seen
            return _combined(operator.add, seen.before, seen.now)

    @contextmanager
    def _shared(self) -> Generator[None]:
        """Loads and stores the counters that API processes share, under a lock."""
        if self._path is None:
            yield
            return
        with self._path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self._path.exists():
                self._seen = msgspec.msgpack.decode(self._path.read_bytes(), type=_Seen)
            before = self._seen
            yield
            if self._seen != before:
                # Replaced atomically: a process that is killed here leaves the old file.
                new = self._path.with_suffix(".new")
                with suppress(OSError):  # a full disk: the next scrape tries again
                    new.write_bytes(msgspec.msgpack.encode(self._seen))
                    new.replace(self._path)


def _combined(operation: Callable[[Any, Any], Any], one: Stats, other: Stats) -> Stats:
    """Combine two Stats by field and by bucket; () stands for no counts yet."""

    def each(a: Any, b: Any) -> Any:
        if isinstance(a, tuple):
            return tuple(map(operation, a, b)) if a and b else a or b  # type: ignore[arg-type]
        return operation(a, b)

    return Stats(*map(each, astuple(one), astuple(other)))
