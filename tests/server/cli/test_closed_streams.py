"""The command where the shell has closed its standard streams."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import os, socket, subprocess, sys
from server.cli.main import main
try:
    main(["no-such-command"])
except SystemExit as end:
    assert end.code == 2
sys.stderr.write("unread")
assert socket.socket().fileno() > 2
child = "import os; os.write(2, b'unread'); print(len(os.read(0, 9)))"
done = subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE)
print(done.returncode, done.stdout, sys.stdin.read() == "")
"""


def test_closed_streams_lead_nowhere_for_the_command_and_its_children():
    command = ["sh", "-c", 'exec "$@" <&- 2>&-', "sh", sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0 b'0\\n' True\n")
