"""Prometheus' own tools accept what deploy/ ships, and every alert fires when it should, only then.

`promtool` is in Debian's package `prometheus`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).parents[2] / "deploy"

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.skipif(
        shutil.which("promtool") is None,
        reason="promtool is not on the PATH: apt-get install prometheus",
    ),
]


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "config", "--syntax-only", "prometheus.yml"],
        ["check", "rules", "rules.yml"],
        ["test", "rules", "rules_test.yml"],
    ],
    ids=" ".join,
)
def test_promtool_accepts(arguments: list[str]) -> None:
    ran = subprocess.run(
        ["promtool", *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
