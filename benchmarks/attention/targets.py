"""Whether a run met the targets of the attention kernels; how well their times were predicted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.attention.cases import MIB
from benchmarks.attention.results import FA3, FA3_PLAN, GREEDY_PLAN, OURS, PLAIN, CaseResult
from benchmarks.attention.timing import Bandwidth

COMPARED_GRIDS = ("decode", "b1", "skewed")
# Rows and length, 8/1 heads, where FlashAttention-3's parts need a second, nearly empty wave.
SECOND_WAVE = ((48, 4096), (67, 4096), (140, 4096), (48, 16384))
# The same with its plan for the plain kernel, of which two programs fit on an SM where there is one
# KV head: its simulated makespan is more than 1.5 times that of `stream-k`.
PLAIN_SECOND_WAVE = (
    *((rows, length) for length in (4096, 16384, 32768) for rows in (45, 67, 100, 140)),
    (34, 32768),
)
B1_LIMITS = {512: 10, 1024: 10, 2048: 10, 4096: 10, 16384: 12, 32768: 18, 65536: 28}
# Flash-Decoding, warm, as published for an A100: microseconds by length.
PUBLISHED_WARM = {512: 8, 1024: 10, 4096: 12, 8192: 13, 16384: 14, 32768: 15, 65536: 28}
PLAN_US = 3.0
PLANS = (PLAIN, GREEDY_PLAN, FA3_PLAN)  # of one kernel
ALIKE = 1.02  # plans that differ by less take the same time


@dataclass(frozen=True, slots=True)
class TargetResult:
    """met is None if nothing was measured that could tell."""

    target: str
    met: bool | None
    found: str

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "not measured"}[self.met]
        return f"{word:<12} {self.target}: {self.found}"


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _name(row: CaseResult) -> str:
    return f"{row.case.heads_name} {row.case.name}{' warm' if row.case.warm else ''}"


def at_least(
    target: str, found: Iterable[tuple[CaseResult, float | None]], limit: float
) -> TargetResult:
    """Every value reaches the limit; what could not be measured does not."""
    values = list(found)
    if not values:
        return TargetResult(target, None, "no such case in this run")
    known = [(value, _name(row)) for row, value in values if value is not None]
    if not known:
        return TargetResult(target, None, f"none of {len(values)} cases has both figures")
    reached = sum(value >= limit for value, _ in known)
    worst, name = min(known)
    text = f"{reached} of {len(values)}, worst {worst:.3g} ({name}), "
    text += f"geometric mean {geometric_mean([value for value, _ in known]):.3f}"
    return TargetResult(target, reached == len(values), text)


def _cold(rows: Sequence[CaseResult], *grids: str) -> list[CaseResult]:
    return [row for row in rows if row.case.grid in grids and not row.case.warm]


def bandwidth_targets(rows: Sequence[CaseResult], bandwidth: Bandwidth) -> Iterator[TargetResult]:
    grid = _cold(rows, "decode")
    for least, most, limit in ((256, math.inf, 0.90), (64, 256, 0.80)):
        chosen = [row for row in grid if least * MIB <= row.case.kv_bytes < most * MIB]
        above = "256 MiB of KV" if least == 256 else "64 MiB of KV, to 256"
        target = f"decode >= {limit:.0%} of the read bandwidth from {above}"
        yield at_least(target, [(row, row.share(bandwidth)) for row in chosen], limit)
    chosen = [row for row in _cold(rows, "fp8") if row.case.kv_bytes >= 256 * MIB]
    target = "float8 pages: decode >= 80% of the read bandwidth from 256 MiB of KV"
    yield at_least(target, [(row, row.share(bandwidth)) for row in chosen], 0.80)


def single_row_targets(rows: Sequence[CaseResult]) -> Iterator[TargetResult]:
    """One row of 16/2 heads: limits cold, the published figures warm, and how flat it is."""
    grid = [row for row in rows if row.case.grid == "b1" and row.case.heads_name == "16/2"]
    cold = [row for row in grid if not row.case.warm and row.case.kv_lens[0] in B1_LIMITS]
    limits = [(row, (us := row.us(OURS)) and B1_LIMITS[row.case.kv_lens[0]] / us) for row in cold]
    yield at_least("one row 16/2, cold: limit over time, 10 / 12 / 18 / 28 us", limits, 1.0)
    warm = {row.case.kv_lens[0]: row for row in grid if row.case.warm}
    published = [
        (row, (us := row.us(OURS)) and PUBLISHED_WARM[length] / us)
        for length, row in warm.items()
        if length in PUBLISHED_WARM
    ]
    yield at_least("one row 16/2, warm: Flash-Decoding's published time over ours", published, 1.0)
    short, long = (warm[length].us(OURS) if length in warm else None for length in (512, 32768))
    target = "one row 16/2, warm: 32k takes at most 15/8 of 512's time, as published"
    if short is None or long is None:
        yield TargetResult(target, None, "no such case in this run")
    else:
        yield TargetResult(target, long / short <= 15 / 8, f"{long:.1f} / {short:.1f} us")


def peer_targets(rows: Sequence[CaseResult]) -> Iterator[TargetResult]:
    """FlashAttention-3 in the same run, and the same kernel with its plan."""
    compared = _cold(rows, *COMPARED_GRIDS)
    ratios = [(row, row.ratio(FA3)) for row in compared]
    yield at_least("FlashAttention-3's time over ours, every case >= 1.00", ratios, 1.0)
    known = [ratio for _, ratio in ratios if ratio is not None]
    target = "FlashAttention-3's time over ours, geometric mean >= 1.20"
    if known:
        mean = geometric_mean(known)
        yield TargetResult(target, mean >= 1.20, f"{mean:.3f} over {len(known)} cases")
    else:
        yield TargetResult(target, None, "no such case in this run")
    second = "second waves (8/1: 48, 67, 140 x 4k; 48 x 16k)"
    yield at_least(
        f"FlashAttention-3's time over ours at {second} >= 1.35",
        [(row, row.ratio(FA3)) for row in _waves(rows, SECOND_WAVE)],
        1.35,
    )
    for name, sizes in (
        (f"FlashAttention-3's {second}", SECOND_WAVE),
        ("this kernel's own second waves (8/1)", PLAIN_SECOND_WAVE),
    ):
        yield at_least(
            f"same (plain) kernel, the plan of `fa3` over ours at {name} >= 1.20",
            [(row, row.ratio(FA3_PLAN, PLAIN)) for row in _waves(rows, sizes)],
            1.20,
        )
    yield at_least(
        "same (plain) kernel, the plan of `fa3` over ours, every case >= 0.98",
        [(row, row.ratio(FA3_PLAN, PLAIN)) for row in compared],
        0.98,
    )


def _waves(rows: Sequence[CaseResult], sizes: Sequence[tuple[int, int]]) -> list[CaseResult]:
    return [
        row
        for row in _cold(rows, "decode")
        if row.case.heads_name == "8/1" and (row.case.rows, row.case.kv_lens[0]) in sizes
    ]


def prefill_targets(rows: Sequence[CaseResult]) -> Iterator[TargetResult]:
    grid = [
        row
        for row in rows
        if row.case.grid == "prefill"
        and row.case.heads_name == "32/8"
        and row.case.head_dim == 128
        and min(row.case.q_lens) >= 4096
    ]
    for subject, limit in ((PLAIN, 380.0), (OURS, 520.0)):
        label = "plain Triton" if subject == PLAIN else "Hopper"
        target = f"prefill 32/8 causal, {label} >= {limit:.0f} TFLOP/s from 4k"
        yield at_least(target, [(row, row.tflops(subject)) for row in grid], limit)
    for limit, what in ((0.95, "prefill"), (1.00, "stretch: prefill")):
        target = f"{what}, FlashAttention-3's time over ours >= {limit:.2f}"
        yield at_least(target, [(row, row.ratio(FA3)) for row in grid], limit)
    longest = [row for row in grid if row.case.q_lens[0] == 16384]
    target = "stretch: prefill of 16k, Hopper >= 570 TFLOP/s"
    yield at_least(target, [(row, row.tflops(OURS)) for row in longest], 570.0)


def mixed_targets(rows: Sequence[CaseResult], subject: str) -> TargetResult:
    grid = [row for row in rows if row.case.grid == "mixed"]
    ratios: list[tuple[CaseResult, float | None]] = []
    for whole in (row for row in grid if not row.case.whole):
        parts = [row.us(subject) for row in grid if row.case.whole == whole.case.name]
        known = [part for part in parts if part is not None]
        us = whole.us(subject)
        complete = us is not None and len(known) == len(parts) > 0
        ratios.append((whole, sum(known) / us if us and complete else None))
    return at_least(f"mixed steps ({subject}): sum of the parts over the whole", ratios, 1.0)


def plan_targets(plan_us: dict[str, float]) -> Iterator[TargetResult]:
    """plan_us: "what makes it, size" -> microseconds of a plan on the device."""
    if not plan_us:
        target = f"a plan on the device <= {PLAN_US:g} us"
        yield TargetResult(target, None, "no plan was timed in this run")
    for maker in dict.fromkeys(name.split(",")[0] for name in plan_us):
        times = {name: us for name, us in plan_us.items() if name.split(",")[0] == maker}
        worst = max(times, key=lambda name: times[name])
        target = f"a plan on the device <= {PLAN_US:g} us ({maker})"
        found = f"{min(times.values()):.2f} to {times[worst]:.2f} us ({worst})"
        yield TargetResult(target, times[worst] <= PLAN_US, found)


def verdicts(
    rows: Sequence[CaseResult], bandwidth: Bandwidth, plan_us: dict[str, float]
) -> list[TargetResult]:
    """All targets; those that this run says nothing about too."""
    return [
        *bandwidth_targets(rows, bandwidth),
        *single_row_targets(rows),
        *peer_targets(rows),
        *prefill_targets(rows),
        *(mixed_targets(rows, subject) for subject in (OURS, "flash2")),
        *plan_targets(plan_us),
    ]


def predictions(rows: Sequence[CaseResult]) -> Iterator[str]:
    """Predicted over measured time of each plan; how often the best predicted plan is best."""
    cold = [row for row in rows if not row.case.warm]
    for subject in (OURS, *PLANS):
        pairs = [
            (row.outcomes[subject].predicted_us, us)
            for row in cold
            if (us := row.us(subject)) and row.outcomes[subject].predicted_us
        ]
        if len(pairs) < 3:
            continue
        ratios = [predicted / us for predicted, us in pairs]
        logs = [(math.log(predicted), math.log(us)) for predicted, us in pairs]
        correlation = statistics.correlation(*zip(*logs, strict=True))
        yield (
            f"predicted over measured, {subject}: geometric mean {geometric_mean(ratios):.3f}, "
            f"{min(ratios):.2f} to {max(ratios):.2f}, correlation of logarithms {correlation:.4f}, "
            f"{len(pairs)} cases"
        )
    right = wrong = 0
    for row in cold:
        times = {subject: us for subject in PLANS if (us := row.us(subject))}
        if len(times) == len(PLANS):
            best = min(times, key=lambda subject: row.outcomes[subject].predicted_us)
            right += times[best] <= min(times.values()) * ALIKE
            wrong += times[best] > min(times.values()) * ALIKE
    if right + wrong:
        yield (
            f"the plan predicted to be best is within {ALIKE - 1:.0%} of the best measured one "
            f"in {right} of {right + wrong} cases"
        )
