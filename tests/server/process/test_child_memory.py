"""The environment of the launcher's processes bounds what PyTorch keeps of shapes seen on a CPU."""

from __future__ import annotations

import subprocess
import sys

from server.process.child import Child

# From the first print to the second it grows by 300 MiB if every kernel is kept, by 40 with limits.
SHAPES = """
import psutil, torch

torch.set_num_threads(1)
for number in range(900):
    rows, size = 2 + 2 * (number % 30), 16 + 16 * (number // 30)
    keys = torch.zeros(rows, size, 64, dtype=torch.bfloat16)
    torch.bmm(torch.zeros(rows, 2, 64, dtype=torch.bfloat16), keys.transpose(1, 2))
    if number in (399, 899):
        print(psutil.Process().memory_info().rss)
"""


def test_matrices_of_ever_new_shapes_leave_the_memory_level():
    environment = Child("the engine", "runtime.engine.process").environment
    command = [sys.executable, "-c", SHAPES]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    before, after = map(int, printed.stdout.split())
    assert after - before < 120 << 20
