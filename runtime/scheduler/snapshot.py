"""What the dashboard shows of the scheduler: its sequences, its pages, its steps.

Nothing here is kept between two snapshots, so an engine that no page watches does none of it.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from runtime.scheduler.kv_cache.page_pool import PagePool
from runtime.scheduler.request_table import RequestTable
from runtime.scheduler.sequence import Sequence
from runtime.scheduler.step_time import StepTimes
from runtime.snapshot import CACHED, FIRST_OWNER, FREE, SHARED, PageMap, SequenceState, StepSample

MAX_CELLS = 2048  # of the map of pages
MAX_WAITING = 16  # sequences that are listed


def running_states(requests: RequestTable) -> tuple[list[Sequence], list[SequenceState]]:
    """The sequences with a slot, those that decode first, and their states."""
    decoding, prefilling = requests.decoding.all(), list(requests.prefilling.values())
    known = requests.decoding.known[requests.decoding.slots].tolist()
    states = [
        _state(sequence, "decode", count - 1, count)
        for sequence, count in zip(decoding, known, strict=True)
    ]
    for one in prefilling:
        kind = "prefill" if one.held_since is None else "held"
        states.append(_state(one, kind, one.num_computed_tokens, len(one.tokens)))
    return [*decoding, *prefilling], states


def waiting_states(requests: RequestTable) -> list[SequenceState]:
    """The first sequences that wait."""
    front = requests.waiting.front()[:MAX_WAITING]
    return [_state(one, "waiting", 0, len(one.tokens)) for one in front if one.finish is None]


def _state(sequence: Sequence, state: str, computed: int, known: int) -> SequenceState:
    return SequenceState(
        sequence.request_id,
        state,  # type: ignore[arg-type]
        sequence.prompt_len,
        sequence.num_cached_tokens,
        computed,
        known,
        sequence.pages.num_held,
        sequence.preemptions,
        sequence.events,
    )


def page_maps(
    pool: PagePool, holders: Items[Items[int]], max_cells: int = MAX_CELLS
) -> tuple[PageMap, list[PageMap]]:
    """-> the map of all pages, and of several groups, that of each one's pages with content.

    holders: the pages of each running sequence.  Some 20 ns a page: a pool of 25,000 pages takes
    half a millisecond, and as much again for groups.
    """
    counts = [len(pages) for pages in holders]
    held = np.fromiter(chain.from_iterable(holders), np.int64, sum(counts))
    cached = np.fromiter(pool.cached_pages, np.int64, len(pool.cached_pages))
    kinds = np.zeros(pool.num_pages, dtype=np.int64)
    kinds[cached] = CACHED
    kinds[held] = np.repeat(np.arange(len(counts)) + FIRST_OWNER, counts)
    kinds[np.bincount(held, minlength=pool.num_pages) > 1] = SHARED
    size, num_kinds = -(-pool.num_pages // max_cells), FIRST_OWNER + len(counts)
    groups: list[PageMap] = []
    if len(pool.used_by_group) > 1:
        group_of = np.array(pool.groups, dtype=np.int64)
        group_of[kinds == FREE] = -1  # none
        for group in range(len(pool.used_by_group)):
            groups.append(_map(kinds[group_of == group], size, num_kinds))
    return _map(kinds, size, num_kinds), groups


def _map(kinds: NDArray[np.int64], size: int, num_kinds: int) -> PageMap:
    """The map of pages of these kinds, in cells of `size` pages."""
    totals = np.bincount(np.minimum(kinds, FIRST_OWNER), minlength=FIRST_OWNER + 1).tolist()
    if size > 1:
        cells = -(-len(kinds) // size)
        cell_of = np.arange(len(kinds)) // size
        counted = np.bincount(cell_of * num_kinds + kinds, minlength=cells * num_kinds)
        kinds = counted.reshape(cells, num_kinds).argmax(axis=1)
    starts = np.flatnonzero(np.diff(kinds, prepend=-1))
    lengths = np.diff(starts, append=len(kinds))
    runs = np.stack((kinds[starts], lengths), axis=1).ravel().tolist()
    return PageMap(size, runs, *totals)


def step_samples(times: StepTimes) -> list[StepSample]:
    return [StepSample(seconds, *load) for load, seconds in times.recent]
