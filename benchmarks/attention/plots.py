"""Plots of a run of bench_attention, as SVG; matplotlib is in the extra `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLOURS = {
    "ours": "#0b6e4f",
    "flash2": "#0b6e4f",
    "plain": "#1f4e9c",
    "FA3": "#d1495b",
    "greedy plan": "#8f6bb3",
    "fa3 plan": "#e09f3e",
    "flash1": "#8f6bb3",
    "mha": "#777777",
    "cuDNN": "#e09f3e",
    "FA2": "#777777",
}
Points = dict[str, list[tuple[float, float]]]


def points(results: dict[str, Any], value: str, **properties: Any) -> Points:
    """(x, value) of each subject over the cases with these properties.

    x is the number of rows if kv_len_max is given, else the KV length.
    """
    found: Points = {}
    for row in results["rows"]:
        case = row["case"]
        if any(case[key] != expected for key, expected in properties.items()):
            continue
        x = case["rows"] if "kv_len_max" in properties else case["kv_len_max"]
        for name, outcome in row["subjects"].items():
            if value in outcome:
                found.setdefault(name, []).append((x, outcome[value]))
    return {name: sorted(pairs) for name, pairs in found.items()}


def svg_figures() -> None:
    """Set matplotlib up so that the same results give the same file, and text stays text."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "wavefill", "font.size": 9, "svg.fonttype": "none"}


def plot(results: dict[str, Any], folder: Path) -> list[str]:
    """Write the plots that the run has data for -> messages."""
    try:
        svg_figures()
    except ModuleNotFoundError:
        return ["no plots: matplotlib is not installed (pip install 'wavefill[bench]')"]
    written: list[str] = []
    for name, picture in (
        ("attention_decode", _decode),
        ("attention_b1", _single_row),
        ("attention_prefill", _prefill),
        ("attention_seeds", _seeds),
    ):
        figure = picture(results)
        if figure is not None:
            path = folder / f"{name}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
            written.append(f"wrote {path}")
    return written or ["no plots: the run has none of the grids that are plotted"]


def _panels(results: dict[str, Any], title: str, panels: list[tuple[str, Points]], **axes: Any):
    """Panels with shared limits, three in a row; None if there is nothing to plot."""
    panels = [(name, data) for name, data in panels if any(len(p) > 1 for p in data.values())]
    if not panels:
        return None
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.0 * lines), layout="constrained")
    plots = figure.subplots(lines, columns, squeeze=False, sharey=axes.pop("sharey", True))
    label, plots = axes.pop("ylabel"), list(plots.flat)
    for plot in plots[::columns]:
        plot.set_ylabel(label)
    for plot in plots[len(panels) :]:
        plot.remove()
    for plot, (name, data) in zip(plots, panels, strict=False):
        for subject, pairs in data.items():
            x, y = zip(*pairs, strict=True)
            colour = COLOURS.get(subject)
            plot.plot(x, y, marker="o", markersize=3, color=colour, linewidth=1.3, label=subject)
        plot.set(title=name, **axes)
        plot.grid(alpha=0.3)
    figure.legend(*plots[0].get_legend_handles_labels(), frameon=False, loc="outside right upper")
    about = results["about"]
    figure.suptitle(f"{title}: {about['device']}, {about['date']}")
    return figure


def _decode(results: dict[str, Any]):
    """Share of the read bandwidth over the batch, for each length and layout of heads."""
    percent = 100 / results["read_tb_s"][0]
    panels: list[tuple[str, Points]] = []
    for heads, kv_heads in ((8, 1), (32, 8)):
        for length in (4096, 16384, 32768):
            case = {"heads": heads, "kv_heads": kv_heads, "kv_len_max": length}
            data = points(results, "kv_tb_s", grid="decode", **case)
            shares = {s: [(x, percent * y) for x, y in pairs] for s, pairs in data.items()}
            panels.append((f"{heads}/{kv_heads} heads, {length // 1024}k", shares))
    labels = {"xlabel": "rows", "ylabel": "% of the read bandwidth", "ylim": (20, 102)}
    return _panels(results, "Decode, cold", panels, xscale="log", **labels)


def _single_row(results: dict[str, Any]):
    """Microseconds over the KV length, one row of 16/2 heads."""
    panels = [
        (word, points(results, "us", grid="b1", heads=16, kv_heads=2, warm=warm))
        for word, warm in (("cold", False), ("warm", True))
    ]
    labels = {"xlabel": "KV length", "ylabel": "us", "xscale": "log", "ylim": (0, None)}
    return _panels(results, "One row, 16/2 heads", panels, **labels)


def _prefill(results: dict[str, Any]):
    data = points(results, "tflop_s", grid="prefill", heads=32, kv_heads=8, head_dim=128)
    labels = {"xlabel": "prompt length", "ylabel": "TFLOP/s", "xscale": "log", "ylim": (0, None)}
    panels = [("causal, 16k tokens in all, 32/8 heads of 128", data)]
    return _panels(results, "Prefill", panels, **labels)


def _seeds(results: dict[str, Any]):
    """mha, flash1 and flash2 over lengths, prompts and decoding."""
    panels: list[tuple[str, Points]] = []
    for title, start in (
        ("prompt", "prompt"),
        ("decode, 1 row", "1 x"),
        ("decode, 16 rows", "16 x"),
    ):
        rows = [row for row in results["rows"] if row["case"]["name"].startswith(start)]
        panels.append((title, points({"rows": rows}, "us", grid="seeds", dtype="bf16")))
    labels = {"xlabel": "length", "ylabel": "us", "xscale": "log", "yscale": "log"}
    return _panels(results, "mha, flash1, flash2", panels, sharey=False, **labels)
