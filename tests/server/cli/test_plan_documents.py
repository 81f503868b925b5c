"""What the documents show of `wavefill plan` is what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.shapes import FAMILIES, SHAPES
from tests.support.cli.reports import wavefill_here
from tests.support.paths import ROOT

DOCS = ROOT / "docs"


def planned(folder: Path, shape: object, card: str) -> str:
    (folder / "config.json").write_text(json.dumps(shape))
    return wavefill_here("plan", folder, "--card", card).stdout


def test_the_example_is_what_the_command_prints(tmp_path: Path):
    text = (DOCS / "operate.md").read_text("utf-8")
    example = text.split("$ wavefill plan Qwen/Qwen3-8B --card 24GiB\n")[1].split("```")[0]
    shown = [line for line in example.splitlines() if not line.startswith("  [WW")]  # a terminal's
    assert planned(tmp_path, SHAPES["qwen3-8b"], "24GiB").splitlines() == shown


def test_the_tokens_of_one_gpu_and_of_two_are_what_the_command_prints(tmp_path: Path):
    text = (DOCS / "parallel.md").read_text("utf-8")
    shown = re.search(r"one holds KV of ([\d,]+) tokens, two of ([\d,]+)\.", text)
    assert shown is not None
    printed = planned(tmp_path, FAMILIES["Qwen3-32B"], "80GiB")
    assert f"KV holds {shown[1]} tokens" in printed
    assert f"on two of them: {shown[2]} tokens" in printed
