"""Snapshot: an engine at one moment, as the dashboard shows it (docs/dashboard.md)."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from runtime.stats import Stats

# When, and the tokens of the chunk of prefill that was scheduled then; 0: it was preempted.
SequenceEvent = tuple[float, int]


class SequenceState(Struct, frozen=True, array_like=True):
    """A sequence in the engine, for the dashboard."""

    id: int
    state: Literal["waiting", "prefill", "decode", "held"]
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    known_tokens: int  # of prompt and answer
    num_pages: int
    preemptions: int
    events: list[SequenceEvent]


class PageMap(Struct, frozen=True, array_like=True):
    """The KV pages in the order of their memory, in cells of as many pages each.

    `runs` are pairs of a kind and the number of consecutive cells of it: FREE, CACHED, SHARED, or
    FIRST_OWNER + i for pages that belong to sequence i alone.  A cell is of the kind that most of
    its pages are of.
    """

    pages_per_cell: int
    runs: list[int]
    free: int  # pages without content, and
    cached: int  # with content that a prefix may hit; both may be taken by any sequence
    shared: int  # by several sequences
    owned: int  # by one


FREE, CACHED, SHARED, FIRST_OWNER = range(4)


class StepSample(Struct, frozen=True, array_like=True):
    """The time of a step, and what it depends on: see runtime/scheduler/step_time.py."""

    seconds: float
    rows: int
    prompt_tokens: int
    kv_tokens: int
    pairs: float
    encoder_stages: int = 0
    encoder_operations: float = 0.0
    has_images: int = 0


class PlanPicture(Struct, frozen=True, array_like=True):
    """A split plan of the rows that decode.  Times are in blocks of KV that a program reads."""

    planner: str
    makespan: float
    combine: float
    # Of each program: row, eighths of a block, row, eighths of a block, ...
    programs: list[list[int]]


class WavePicture(Struct, frozen=True, array_like=True):
    """What each program of a decode step reads, and what FlashAttention-3's rule would let it."""

    device: str
    runs_here: bool  # False: it is the plan that this GPU would get
    sms: int
    programs: int
    block: int  # tokens
    block_us: float
    lower_bound: float  # of every plan's makespan
    rows: list[int]  # the request of each row
    kv_tokens: list[int]  # of each row
    plan: PlanPicture
    fa3: PlanPicture


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot"):
    """The engine at one moment, for dashboards; sent while one is open."""

    at: float
    stats: Stats
    sequences: list[SequenceState]  # those with a slot, whose place numbers them in `pages`;
    waiting: list[SequenceState]  # and the first of those that wait
    pages: PageMap
    steps: list[StepSample]  # the last ones
    # Seconds of a step and of each unit of StepSample's load, in its order; () if unknown.
    weights: tuple[float, ...]
    wave: WavePicture | None  # None: no row decodes, or there is no plan for this model
    shares: list[tuple[int, bytes]]  # of API processes, by index
    build_seconds: float  # of CPU time, that it took to make this
    # Of several groups of layers, the pages with content of each; [] if there is one group.
    page_groups: list[PageMap] = []
