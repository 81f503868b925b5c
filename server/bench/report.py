"""The report of a sweep: one HTML file with plots and a table, which loads nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.metadata import version

from server.bench.metrics import Spread, Summary
from server.bench.plot import Series, number, plot

STYLE = """
:root { color-scheme: light dark; --s0: #1864ab; --s1: #d9480f; --s2: #2b8a3e; --grid: #8884; }
@media (prefers-color-scheme: dark) { :root { --s0: #74c0fc; --s1: #ffa94d; --s2: #8ce99a; } }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1180px; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.05rem; margin: 0 0 .3rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
  gap: 1.6rem; }
figure { margin: 0; } svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; }
svg text { fill: currentColor; } .grid { stroke: var(--grid); }
.tick, .name, .label { text-anchor: middle; } .ytick { text-anchor: end; }
.name { font-size: 12px; } .label { font-size: 10px; opacity: .8; }
polyline { fill: none; stroke-width: 2; }
polyline.s0 { stroke: var(--s0); } polyline.s1 { stroke: var(--s1); }
polyline.s2 { stroke: var(--s2); }
circle.s0, text.s0 { fill: var(--s0); } circle.s1, text.s1 { fill: var(--s1); }
circle.s2, text.s2 { fill: var(--s2); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums;
  margin: 1.6rem 0; }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--grid);
  white-space: nowrap; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { opacity: .7; } dd { margin: 0; }
"""


@dataclass(frozen=True)
class SweepPoint:
    """One load, in clients or in requests a second, and its figures."""

    load: float
    summary: Summary


Column = tuple[str, Callable[[Summary], float | None]]


def _ms(read: Callable[[Summary], Spread | None], field: str) -> Callable[[Summary], float | None]:
    def value(summary: Summary) -> float | None:
        spread = read(summary)
        return None if spread is None else getattr(spread, field)

    return value


TTFT: list[Column] = [
    ("TTFT p50", _ms(lambda s: s.ttft_ms, "p50")),
    ("TTFT p99", _ms(lambda s: s.ttft_ms, "p99")),
]
ITL: list[Column] = [
    ("ITL p50", _ms(lambda s: s.itl_ms, "p50")),
    ("ITL p99", _ms(lambda s: s.itl_ms, "p99")),
]
COLUMNS: list[Column] = [
    ("answered", lambda s: s.completed),
    ("failed", lambda s: s.failed),
    ("requests/s", lambda s: s.requests_per_s),
    ("good requests/s", lambda s: s.good_requests_per_s),
    ("output tokens/s", lambda s: s.output_tokens_per_s),
    ("total tokens/s", lambda s: s.total_tokens_per_s),
    *TTFT,
    *ITL,
    ("TPOT mean", _ms(lambda s: s.tpot_ms, "mean")),
    ("E2E p50", _ms(lambda s: s.e2e_ms, "p50")),
]


def sweep_report(
    title: str, unit: str, points: Sequence[SweepPoint], arguments: Mapping[str, object]
) -> str:
    """unit: of the loads"""
    plots = [
        ("Throughput against time to first token", _against(points, unit, TTFT, "TTFT, ms")),
        ("Throughput against inter-token latency", _against(points, unit, ITL, "ITL, ms")),
        ("Throughput of each load", _by_load(points, unit, [COLUMNS[4]], "output tokens/s")),
        ("Requests of each load", _by_load(points, unit, COLUMNS[2:4], "requests/s")),
    ]
    figures = "\n".join(
        f"<figure><h2>{escape(name)}</h2>{svg}</figure>" for name, svg in plots if svg
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
<p>wavefill {escape(version("wavefill"))}, {escape(str(arguments.get("date", "")))}. Times are
milliseconds, as the client saw them. Numbers beside points are {escape(unit)}.</p>
<div class="plots">
{figures}
</div>
<div class="wide">{_table(points, unit)}</div>
<h2>Arguments</h2>
<dl>{_arguments(arguments)}</dl>
</body>
</html>
"""


def _against(points: Sequence[SweepPoint], unit: str, columns: list[Column], y_name: str) -> str:
    """Latency of each load over its throughput."""
    series = [
        _series(name, [(p.summary.output_tokens_per_s, read(p.summary), p.load) for p in points])
        for name, read in columns
    ]
    return _plot("output tokens/s", y_name, series)


def _by_load(points: Sequence[SweepPoint], unit: str, columns: list[Column], y_name: str) -> str:
    series = [
        _series(name, [(p.load, read(p.summary), p.load) for p in points]) for name, read in columns
    ]
    return _plot(unit, y_name, series)


def _series(name: str, values: list[tuple[float, float | None, float]]) -> Series:
    found = [(x, y, load) for x, y, load in values if y is not None and x > 0]
    return Series(
        name,
        [x for x, _, _ in found],
        [y for _, y, _ in found],
        [f"{load:g}" for _, _, load in found],
    )


def _plot(x_name: str, y_name: str, series: list[Series]) -> str:
    """Nothing where nothing was measured, such as goodput without limits."""
    found = [each for each in series if each.xs]
    return plot(x_name, y_name, found) if found else ""


def _table(points: Sequence[SweepPoint], unit: str) -> str:
    columns = [c for c in COLUMNS if any(c[1](p.summary) is not None for p in points)]
    head = "".join(f"<th>{escape(name)}</th>" for name in (unit, *(c[0] for c in columns)))
    rows: list[str] = []
    for point in points:
        values = [read(point.summary) for _, read in columns]
        cells = [f"{point.load:g}", *("-" if v is None else number(v) for v in values)]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _arguments(arguments: Mapping[str, object]) -> str:
    return "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(_text(value))}</dd>"
        for name, value in arguments.items()
        if value is not None and value is not False
    )


def _text(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)  # pyright: ignore
