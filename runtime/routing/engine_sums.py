"""Several engines as one: what they can take and what they count, together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import astuple, replace

from runtime.messages import Ready
from runtime.stats import Stats

LAST = ("step_tokens", "step_seconds")  # of the last step: no sums


def ready_of_all(engines: Sequence[Ready | None]) -> Ready | None:
    """What the engines that are ready have together; None if none is.

    A request runs on one of them, so its length is what any of them can take.
    """
    ready = [engine for engine in engines if engine is not None]
    if not ready:
        return None
    if len(engines) == 1:
        return ready[0]
    return replace(
        ready[0],
        epoch=0,  # each has its own
        max_model_len=min(each.max_model_len for each in ready),
        num_pages=sum(each.num_pages for each in ready),
        max_num_seqs=sum(each.max_num_seqs for each in ready),
        weight_bytes=sum(each.weight_bytes for each in ready),
        kv_bytes=sum(each.kv_bytes for each in ready),
        load_seconds=max(each.load_seconds for each in ready),
        num_states=sum(each.num_states for each in ready),
        num_snapshots=sum(each.num_snapshots for each in ready),
    )


def stats_of_all(engines: Sequence[Stats]) -> Stats:
    """Sums; of the last step, the longest one."""
    if len(engines) == 1:
        return engines[0]
    columns = zip(*map(astuple, engines), strict=True)
    pairs = zip(Stats.__struct_fields__, columns, strict=True)
    return Stats(*(max(values) if name in LAST else _sum(values) for name, values in pairs))


def _sum(values: Sequence[Any]) -> Any:
    """Of numbers, or of tuples by place; () has nothing to add."""
    if not isinstance(values[0], tuple):
        return sum(values)
    counted = [each for each in values if each]
    return tuple(map(sum, zip(*counted, strict=True)))
