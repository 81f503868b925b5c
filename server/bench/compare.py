"""Two servers measured in turns: the ratios of each turn, and how they spread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from server.bench.metrics import Spread, Summary


@dataclass(frozen=True)
class Figure:
    """One figure of a summary; None where nothing was measured."""

    name: str
    read: Callable[[Summary], float | None]
    more_is_better: bool


def _of(spread: Spread | None, field: str) -> float | None:
    return None if spread is None else getattr(spread, field)


FIGURES = (
    Figure("output tokens / s", lambda s: s.output_tokens_per_s, True),
    Figure("total tokens / s", lambda s: s.total_tokens_per_s, True),
    Figure("TTFT p50, ms", lambda s: _of(s.ttft_ms, "p50"), False),
    Figure("TTFT p99, ms", lambda s: _of(s.ttft_ms, "p99"), False),
    Figure("ITL p50, ms", lambda s: _of(s.itl_ms, "p50"), False),
    Figure("ITL p99, ms", lambda s: _of(s.itl_ms, "p99"), False),
    Figure("TPOT mean, ms", lambda s: _of(s.tpot_ms, "mean"), False),
    Figure("E2E p50, ms", lambda s: _of(s.e2e_ms, "p50"), False),
    Figure("good requests / s", lambda s: s.good_requests_per_s, True),
)


@dataclass(frozen=True)
class Comparison:
    """One figure of both servers: medians over the turns, and the ratios B / A of each turn."""

    name: str
    a: float
    b: float
    ratio: float  # median of `ratios`
    lowest: float
    highest: float
    ratios: tuple[float, ...]
    b_better: int  # turns in which B was better

    @property
    def verdict(self) -> str:
        """Who is better; only what all turns agree on is a difference."""
        if self.b_better == len(self.ratios):
            return "B"
        return "A" if self.b_better == 0 and 1.0 not in self.ratios else "either"


def order_of_turn(turn: int) -> tuple[int, int]:
    """A, B and then B, A: what grows or falls over time favours neither."""
    return (0, 1) if turn % 2 == 0 else (1, 0)


def compare(turns: Sequence[tuple[Summary, Summary]]) -> list[Comparison]:
    """Of figures that both servers have in every turn."""
    found: list[Comparison] = []
    for figure in FIGURES:
        pairs = [(figure.read(a), figure.read(b)) for a, b in turns]
        both = [(a, b) for a, b in pairs if a and b]
        if len(both) < len(turns):
            continue
        ratios = tuple(b / a for a, b in both)
        better = sum(ratio > 1 if figure.more_is_better else ratio < 1 for ratio in ratios)
        found.append(
            Comparison(
                name=figure.name,
                a=median(a for a, _ in both),
                b=median(b for _, b in both),
                ratio=median(ratios),
                lowest=min(ratios),
                highest=max(ratios),
                ratios=ratios,
                b_better=better,
            )
        )
    return found


def comparison_table(found: Sequence[Comparison]) -> str:
    """At most 80 columns."""
    lines = [f"{'':<19}{'A':>11}{'B':>11}{'B / A':>8}{'lowest':>9}{'highest':>9}  better"]
    lines += [
        f"{each.name:<19}{each.a:>11,.2f}{each.b:>11,.2f}{each.ratio:>8.3f}"
        f"{each.lowest:>9.3f}{each.highest:>9.3f}  {each.verdict}"
        for each in found
    ]
    return "\n".join(lines)
