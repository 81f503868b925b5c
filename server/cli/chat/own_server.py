"""A server that `wavefill chat` starts where none runs, and stops at its end."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from server.cli.chat.client import ChatServer, ChatServerError
from server.cli.main import KEY
from server.cli.terminal import ProgressLine

POLL_SECONDS = 0.1
STOP_SECONDS = 15.0
LOG_LINES = 15  # of the log, where a start fails
# It serves one person: nothing has to be drained, and the port is not for others.
OPTIONS = ("--host", "127.0.0.1", "--drain-delay", "0", "--drain-seconds", "1")


class OwnServer:
    """A context manager.  Other users of this machine cannot use it: it has a key of its own."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """arguments: of `wavefill serve`"""
        self._arguments = tuple(arguments)
        self._key = secrets.token_urlsafe(24)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = -1

    def __enter__(self) -> OwnServer:
        return self

    def start(self) -> ChatServer:
        """Returns when it answers requests.  Raises ChatServerError if it does not come so far."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log, name = tempfile.mkstemp()
        os.unlink(name)  # it ends with the descriptors
        module = "server.cli.chat.attached_serve"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *self._arguments, *OPTIONS, "--port", str(port)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=os.environ | {KEY: self._key},
            start_new_session=True,  # Ctrl-C ends an answer, not the server
        )
        server = ChatServer(self.url, self._key)
        line, began = ProgressLine(), time.monotonic()
        try:
            while (reason := server.not_ready()) is not None:
                if self._process.poll() is not None:
                    raise ChatServerError(f"the server did not start:\n{self._end_of_log()}")
                doing = reason.partition("(")[2].partition(")")[0] or "starting"
                line.show(f"starting a server: {doing}, {time.monotonic() - began:.0f} s")
                time.sleep(POLL_SECONDS)
        finally:
            line.clear()
        return server

    def __exit__(self, *_: object) -> None:
        """Stop it; at once if it does not end."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # its processes end with its pipes
                process.wait()
        process.stdin.close()
        os.close(self._log)

    @property
    def stopped(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _end_of_log(self) -> str:
        text = os.pread(self._log, os.fstat(self._log).st_size, 0).decode("utf-8", "replace")
        return "\n".join(text.strip().splitlines()[-LOG_LINES:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
