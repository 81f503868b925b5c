"""Writes the dashboards: `python deploy/grafana/make_dashboards.py`."""

from __future__ import annotations

import json
from pathlib import Path

import capacity
import engine
import latency
import overview
from panels import dashboard

FOLDER = Path(__file__).parent / "dashboards"


def texts() -> dict[str, str]:
    """Each dashboard's name and JSON."""
    made = {
        "overview": dashboard("overview", overview.DESCRIPTION, overview.overview()),
        "latency": dashboard("latency", latency.DESCRIPTION, latency.latency()),
        "capacity": dashboard("capacity", capacity.DESCRIPTION, capacity.capacity()),
        "engine": dashboard("engine", engine.DESCRIPTION, engine.engine()),
    }
    return {
        name: json.dumps(board, indent=2, ensure_ascii=False) + "\n" for name, board in made.items()
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / f"{name}.json").write_text(text)
