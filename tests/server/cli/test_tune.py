"""`wavefill tune`: what it does where there is nothing to measure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

COMMAND = Path(sys.executable).parent / "wavefill"


def test_without_a_gpu_it_says_so_and_what_to_do(tmp_path: Path):
    done = subprocess.run(
        [COMMAND, "tune"],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert done.returncode == 1 and done.stdout == ""
    assert "run it on the serving machine" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
