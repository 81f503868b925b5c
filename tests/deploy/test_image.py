"""The image is built and run: `deploy/verify.sh`, for the target that needs no GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(3600)
def test_the_cpu_image_builds_and_passes_its_checks(tmp_path: Path) -> None:
    if shutil.which("podman") is None and shutil.which("docker") is None:
        pytest.skip("neither podman nor docker is installed: apt-get install podman buildah runc")
    if "PIP_EXTRA_ARGS" not in os.environ:
        pytest.skip("PIP_EXTRA_ARGS does not say where PyTorch's CPU build is: docs/operate.md")
    command = ["sh", str(ROOT / "deploy" / "verify.sh"), "cpu"]
    ran = subprocess.run(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    sys.stdout.write(ran.stdout)
    assert ran.returncode == 0, ran.stdout
    assert "wavefill:cpu: all checks passed" in ran.stdout
    assert "FAIL" not in ran.stdout
