"""Line plots as SVG, in the colours of the page that they stand in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48
TICKS = 6
LOG_RANGE = 20  # values that differ by more than this factor get a logarithmic axis
LABEL_GAP = 26  # between the labels of two points


@dataclass(frozen=True)
class Series:
    """A line; `labels` stand beside its points and in their tooltips."""

    name: str
    xs: Sequence[float]
    ys: Sequence[float]
    labels: Sequence[str]


class Axis:
    """From values to pixels, linear from 0 or logarithmic."""

    def __init__(self, values: Sequence[float], low: float, high: float) -> None:
        """low, high: pixels of the axis' ends"""
        positive = [value for value in values if value > 0]
        self.log = len(positive) == len(values) > 0 and max(positive) / min(positive) > LOG_RANGE
        self._pixels = low, high
        most = max(values, default=0.0) or 1.0
        self.ticks = log_ticks(min(positive), most) if self.log else linear_ticks(most)
        self._from, self._to = self._scaled(self.ticks[0]), self._scaled(self.ticks[-1])

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def pixel(self, value: float) -> float:
        low, high = self._pixels
        share = (self._scaled(value) - self._from) / (self._to - self._from)
        return low + share * (high - low)


def linear_ticks(most: float) -> list[float]:
    """From 0 to at least `most`, in steps of 1, 2 or 5 times a power of ten."""
    rough = most / (TICKS - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    count = math.ceil(most / step - 1e-9)
    return [step * index for index in range(count + 1)]


def log_ticks(least: float, most: float) -> list[float]:
    """1, 2 and 5 times the powers of ten around the values; powers alone if these are many."""
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    fine = [m * 10.0**power for power in powers for m in (1, 2, 5)]
    first = max(index for index, tick in enumerate(fine) if tick <= least * (1 + 1e-9))
    last = min(index for index, tick in enumerate(fine) if tick >= most * (1 - 1e-9))
    ticks = fine[first : max(last, first + 1) + 1]
    return ticks if len(ticks) <= 2 * TICKS else [10.0**power for power in powers]


def plot(x_name: str, y_name: str, series: Sequence[Series]) -> str:
    """An <svg> with axes, grid, lines and a legend."""
    x = Axis([v for each in series for v in each.xs], LEFT, WIDTH - RIGHT)
    y = Axis([v for each in series for v in each.ys], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(y_name)} against {escape(x_name)}">',
        *_axes(x, y, x_name, y_name),
    ]
    for index, each in enumerate(series):
        parts += _line(each, index, x, y)
    if len(series) > 1:
        parts += [
            f'<text class="s{index}" x="{LEFT + 10}" y="{TOP + 14 + 16 * index}">'
            f"\u25cf {escape(each.name)}</text>"
            for index, each in enumerate(series)
        ]
    return "\n".join([*parts, "</svg>"])


def _axes(x: Axis, y: Axis, x_name: str, y_name: str) -> list[str]:
    low, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts: list[str] = []
    for tick in x.ticks:
        at = x.pixel(tick)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{low}"/>')
        parts.append(f'<text class="tick" x="{at:.1f}" y="{low + 16}">{number(tick)}</text>')
    for tick in y.ticks:
        at = y.pixel(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}"/>')
        parts.append(f'<text class="ytick" x="{LEFT - 6}" y="{at + 4:.1f}">{number(tick)}</text>')
    middle = (LEFT + right) / 2, (TOP + low) / 2
    scale = " (log)" if x.log else ""
    parts.append(
        f'<text class="name" x="{middle[0]}" y="{HEIGHT - 8}">{escape(x_name)}{scale}</text>'
    )
    scale = " (log)" if y.log else ""
    parts.append(
        f'<text class="name" transform="translate(14 {middle[1]}) rotate(-90)">'
        f"{escape(y_name)}{scale}</text>"
    )
    return parts


def _line(series: Series, index: int, x: Axis, y: Axis) -> list[str]:
    places = [(x.pixel(a), y.pixel(b)) for a, b in zip(series.xs, series.ys, strict=True)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
    parts = [f'<polyline class="s{index}" points="{path}"/>']
    labelled: list[tuple[float, float]] = []
    for (a, b), label, at, value in zip(places, series.labels, series.xs, series.ys, strict=True):
        tip = f"{series.name}, {label}: {number(at)}, {number(value)}"
        parts.append(
            f'<circle class="s{index}" cx="{a:.1f}" cy="{b:.1f}" r="3.5">'
            f"<title>{escape(tip)}</title></circle>"
        )
        if all(math.dist((a, b), other) > LABEL_GAP for other in labelled):
            labelled.append((a, b))
            parts.append(f'<text class="label" x="{a:.1f}" y="{b - 8:.1f}">{escape(label)}</text>')
    return parts


def number(value: float) -> str:
    """Three digits, more where they are whole: 0.25, 1.5, 12,000."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
