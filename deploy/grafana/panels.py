"""What the dashboards are made of: expressions, panels, variables."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

# The labels that the variables choose, in every selector.
SELECT = 'job=~"$job", instance=~"$instance", model_name=~"$model_name"'
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUANTILES = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))
# Upper bounds of buckets, as /metrics writes them: of the first token, and between tokens.
OBJECTIVES = {
    "slo_ttft": ("Objective: first token (s)", ["0.1", "0.25", "0.5", "1.0", "2.5", "5.0", "10.0"]),
    "slo_itl": ("Objective: between tokens (s)", ["0.01", "0.025", "0.05", "0.1", "0.2", "0.5"]),
}
DEFAULTS = {"slo_ttft": "1.0", "slo_itl": "0.1"}
Step = tuple[str, float | None]
Panel = dict[str, Any]

GOOD_LOW: dict[str, list[Step]] = {  # a quantity that should stay low -> its thresholds
    "errors": [("green", None), ("orange", 0.01), ("red", 0.02)],
    "share": [("green", None), ("orange", 0.8), ("red", 0.95)],
    "waiting": [("green", None), ("orange", 1), ("red", 10)],
    "ttft": [("green", None), ("orange", 1), ("red", 5)],
    "itl": [("green", None), ("orange", 0.05), ("red", 0.1)],
    "e2e": [("green", None), ("orange", 30), ("red", 120)],
    "some": [("green", None), ("orange", 0.001)],
}
GOOD_HIGH: dict[str, list[Step]] = {
    "attained": [("red", None), ("orange", 0.95), ("green", 0.99)],
    "all": [("red", None), ("green", 1)],
}
PLAIN: list[Step] = [("blue", None)]


def rate(metric: str, by: str = "", where: str = "") -> str:
    """Per second, of a counter, over all that the variables choose."""
    labels = f"{SELECT}, {where}" if where else SELECT
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({metric}{{{labels}}}[$__rate_interval]))"


def gauge(metric: str, by: str = "", where: str = "", how: str = "sum") -> str:
    labels = f"{SELECT}, {where}" if where else SELECT
    group = f" by ({by})" if by else ""
    return f"{how}{group} ({metric}{{{labels}}})"


def quantile(level: float, histogram: str) -> str:
    return f"histogram_quantile({level}, {rate(f'{histogram}_bucket', 'le')})"


def within(histogram: str, objective: str) -> str:
    """The share of observations that were not above the objective."""
    inside = rate(f"{histogram}_bucket", where=f'le="${objective}"')
    return f"{inside} / {rate(f'{histogram}_count')}"


def ratio(part: str, whole: str) -> str:
    """0 while nothing of `part` has ever been counted."""
    return f"({part} or vector(0)) / {whole}"


def quantiles(histogram: str) -> list[tuple[str, str]]:
    return [(name, quantile(level, histogram)) for name, level in QUANTILES]


def _panel(
    kind: str,
    title: str,
    text: str,
    unit: str,
    targets: Iterable[tuple[str, str]],
    steps: list[Step],
    **options: Any,
) -> Panel:
    thresholds = {"mode": "absolute", "steps": [{"color": c, "value": v} for c, v in steps]}
    return {
        "type": kind,
        "title": title,
        "description": text,
        "datasource": DATA_SOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "thresholds": thresholds},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": "ABCDEF"[place],
                "datasource": DATA_SOURCE,
                "expr": expression,
                "legendFormat": legend,
            }
            for place, (legend, expression) in enumerate(targets)
        ],
    }


def tile(title: str, text: str, unit: str, expression: str, steps: list[Step] = PLAIN) -> Panel:
    """One number, coloured by its thresholds, above its recent course."""
    shown = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    panel = _panel(
        "stat", title, text, unit, [("", expression)], steps,
        reduceOptions=shown, colorMode="value", graphMode="area", textMode="value",
    )  # fmt: skip
    return panel | {"gridPos": {"w": 4, "h": 4}}


def graph(
    title: str,
    text: str,
    unit: str,
    targets: Iterable[tuple[str, str]],
    steps: list[Step] = PLAIN,
    *,
    stacked: bool = False,
) -> Panel:
    """Courses of one quantity; thresholds are lines if there are any."""
    panel = _panel(
        "timeseries", title, text, unit, targets, steps,
        legend={"displayMode": "list", "placement": "bottom", "showLegend": True},
        tooltip={"mode": "multi", "sort": "desc"},
    )  # fmt: skip
    panel["fieldConfig"]["defaults"]["custom"] = {
        "fillOpacity": 30 if stacked else 8,
        "showPoints": "never",
        "stacking": {"mode": "normal" if stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "off" if steps is PLAIN else "line"},
    }
    return panel | {"gridPos": {"w": 12, "h": 8}}


def heatmap(title: str, text: str, unit: str, histogram: str) -> Panel:
    """How many observations a second fell into which bucket."""
    panel = _panel(
        "heatmap", title, text, unit, [("{{le}}", rate(f"{histogram}_bucket", "le"))], PLAIN,
        calculate=False,
        color={"mode": "scheme", "scheme": "Oranges", "scale": "exponential", "exponent": 0.5},
        yAxis={"unit": unit, "axisPlacement": "left"},
        tooltip={"mode": "single", "yHistogram": True},
    )  # fmt: skip
    panel["targets"][0]["format"] = "heatmap"
    return panel | {"gridPos": {"w": 12, "h": 8}}


def timeline(title: str, text: str, expression: str, legend: str) -> Panel:
    panel = _panel(
        "state-timeline", title, text, "short", [(legend, expression)],
        [("transparent", None), ("blue", 1)], showValue="never", mergeValues=True,
    )  # fmt: skip
    return panel | {"gridPos": {"w": 12, "h": 8}}


def table(title: str, text: str, expression: str) -> Panel:
    panel = _panel("table", title, text, "short", [("", expression)], PLAIN, showHeader=True)
    panel["targets"][0] |= {"format": "table", "instant": True}
    return panel | {"gridPos": {"w": 12, "h": 8}}


def row(title: str) -> Panel:
    return {
        "type": "row",
        "title": title,
        "collapsed": False,
        "panels": [],
        "gridPos": {"w": 24, "h": 1},
    }


def dashboard(name: str, description: str, panels: list[Panel]) -> dict[str, Any]:
    placed: list[Panel] = []
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        size = panel["gridPos"]
        if x + size["w"] > 24 or panel["type"] == "row":
            x, y, height = 0, y + height, 0
        # Not in place: a panel may be on two dashboards.
        placed.append(panel | {"id": number, "gridPos": {"x": x, "y": y, **size}})
        x, height = x + size["w"], max(height, size["h"])
    return {
        "uid": f"wavefill-{name}",
        "title": f"Wavefill / {name.capitalize()}",
        "description": description,
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "10s",
        "timezone": "browser",
        "tags": ["wavefill"],
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "links": [
            {"type": "dashboards", "title": "Wavefill", "tags": ["wavefill"], "asDropdown": False,
             "includeVars": True, "keepTime": True},
        ],
        "panels": placed,
    }  # fmt: skip


def _variables() -> list[dict[str, Any]]:
    source = {
        "name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus",
        "current": {}, "hide": 0, "refresh": 1,
    }  # fmt: skip
    chosen = [
        _label_values("job", "Job", "wavefill_engine_up"),
        _label_values("instance", "Instance", 'wavefill_engine_up{job=~"$job"}'),
        _label_values("model_name", "Model", 'wavefill_engine_up{job=~"$job"}'),
    ]
    objectives = [
        {
            "name": name, "label": label, "type": "custom", "query": ",".join(values),
            "options": [
                {"text": value, "value": value, "selected": value == DEFAULTS[name]}
                for value in values
            ],
            "current": {"text": DEFAULTS[name], "value": DEFAULTS[name]},
        }
        for name, (label, values) in OBJECTIVES.items()
    ]  # fmt: skip
    return [source, *chosen, *objectives]


def _label_values(name: str, label: str, series: str) -> dict[str, Any]:
    query = f"label_values({series}, {name})"
    return {
        "name": name, "label": label, "type": "query", "datasource": DATA_SOURCE,
        "query": {"query": query, "refId": name}, "definition": query, "includeAll": True,
        "multi": True, "allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]},
        "refresh": 2, "sort": 1,
    }  # fmt: skip
