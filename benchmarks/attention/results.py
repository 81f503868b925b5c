"""Rows of results: what was measured of each case, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.attention.cases import MIB, AttentionCase
from benchmarks.attention.timing import Bandwidth

WRONG = 0.03  # relative difference between two subjects that is more than rounding
# Subjects.  The first that a row has is ours, which the others are compared with: the kernels that
# the table chooses, with the stream-K plan (`stream-k`).  "plain" is the plain Triton kernels with
# that plan; they run the other planners' plans too.
OURS, PLAIN, FA3 = "ours", "plain", "FA3"
GREEDY_PLAN, FA3_PLAN = "greedy plan", "fa3 plan"


@dataclass(frozen=True, slots=True)
class SubjectOutcome:
    """Microseconds of a subject, or why there are none."""

    us: float = 0.0
    low: float = 0.0
    high: float = 0.0
    difference: float | None = None  # |a - b| / |b| against the row's first subject
    predicted_us: float = 0.0  # by simulation of the plan; 0: there is none
    kernels: str = ""  # that the table chose
    error: str = ""

    @property
    def wrong(self) -> bool:
        """Not the same attention; NaN is wrong as well."""
        return self.difference is not None and not self.difference <= WRONG


@dataclass(frozen=True, slots=True)
class CaseResult:
    case: AttentionCase
    outcomes: dict[str, SubjectOutcome] = field(default_factory=dict)

    def us(self, subject: str) -> float | None:
        """None if it was not measured or is wrong."""
        outcome = self.outcomes.get(subject)
        return None if outcome is None or outcome.error or outcome.wrong else outcome.us

    def ratio(self, other: str, subject: str = OURS) -> float | None:
        """How many times faster `subject` is than `other`."""
        mine, theirs = self.us(subject), self.us(other)
        return None if mine is None or theirs is None else theirs / mine

    def share(self, bandwidth: Bandwidth, subject: str = OURS) -> float | None:
        """KV bytes a second over the measured read bandwidth."""
        us = self.us(subject)
        return None if us is None else self.case.kv_bytes / us / 1e6 / bandwidth.read

    def tflops(self, subject: str) -> float | None:
        us = self.us(subject)
        return None if us is None else self.case.flops / us / 1e6

    def to_json(self) -> dict[str, Any]:
        """The case without its lists of lengths, its sizes, and each outcome with what follows."""
        case = asdict(self.case)
        for key in ("q_lens", "kv_lens"):
            lens = case.pop(key)
            case[key[:-1] + "_sum"], case[key[:-1] + "_max"] = sum(lens), max(lens)
        case |= {"rows": self.case.rows, "kv_bytes": self.case.kv_bytes}
        case |= {"qo_bytes": self.case.qo_bytes, "flops": self.case.flops}
        outcomes: dict[str, dict[str, Any]] = {}
        for name, outcome in self.outcomes.items():
            if outcome.error:
                outcomes[name] = {"error": outcome.error}
                continue
            outcomes[name] = {
                "us": round(outcome.us, 3),
                "us_low": round(outcome.low, 3),
                "us_high": round(outcome.high, 3),
                "kv_tb_s": round(self.case.kv_bytes / outcome.us / 1e6, 4),
                "all_tb_s": round((self.case.kv_bytes + self.case.qo_bytes) / outcome.us / 1e6, 4),
                "tflop_s": round(self.case.flops / outcome.us / 1e6, 1),
                "difference": outcome.difference,
                "predicted_us": round(outcome.predicted_us, 3) or None,
                "kernels": outcome.kernels or None,
            }
        return {"case": case, "subjects": outcomes}


def _cell(value: float | None, width: int, digits: int) -> str:
    return ("-" if value is None else f"{value:.{digits}f}").rjust(width)


def header(subjects: Iterable[str], decode: bool) -> str:
    names = list(subjects)
    text = f"{'heads':>6} {'case':<36} {'KV MiB':>8}"
    if not decode:
        return text + "".join(f" {name + ' us':>10} {'TFLOP/s':>7}" for name in names)
    text += "".join(f" {name + ' us':>9}" for name in names)
    text += f" {'TB/s':>5} {'+q,o':>5} {'share':>5} {'pred us':>8}"
    return text + "".join(f" {name + ' x':>6}" for name in names[1:])


def line(row: CaseResult, subjects: Iterable[str], bandwidth: Bandwidth, decode: bool) -> str:
    """A row as text: times; then TB/s of the first, its share of the bandwidth, and ratios."""
    case, names = row.case, list(subjects)
    name = case.name + (" warm" if case.warm else "")
    text = f"{case.heads_name:>6} {name:<36} {case.kv_bytes / MIB:>8.1f}"
    if not decode:
        for subject in names:
            width = max(10, len(subject) + 3)
            text += f" {_cell(row.us(subject), width, 1)} {_cell(row.tflops(subject), 7, 0)}"
        return text
    for subject in names:
        text += f" {_cell(row.us(subject), max(9, len(subject) + 3), 2)}"
    us = row.us(names[0])
    for count in (case.kv_bytes, case.kv_bytes + case.qo_bytes):
        text += f" {_cell(us and count / us / 1e6, 5, 2)}"
    text += f" {_cell(row.share(bandwidth, names[0]), 5, 3)}"
    text += f" {_cell(row.outcomes[names[0]].predicted_us or None, 8, 1)}"
    for subject in names[1:]:
        text += f" {_cell(row.ratio(subject, names[0]), max(6, len(subject) + 2), 2)}"
    return text


def complaints(row: CaseResult) -> list[str]:
    """Why subjects of the row have no time."""
    found: list[str] = []
    for name, outcome in row.outcomes.items():
        if outcome.error:
            found.append(f"       {name}: {outcome.error}")
        elif outcome.wrong:
            found.append(f"       {name}: WRONG, its result differs by {outcome.difference:.3g}")
    return found
