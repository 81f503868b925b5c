"""A command in a pseudo-terminal of 80 columns: what a person would type and see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]")


class PseudoTerminal:
    """The process, and everything that it has written."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self._descriptor = descriptor
        self._bytes = b""
        self._seen = 0  # characters that were waited for

    @property
    def raw(self) -> str:
        return self._bytes.decode("utf-8", errors="replace")

    @property
    def text(self) -> str:
        """Without escape sequences."""
        return ESCAPES.sub("", self.raw)

    @property
    def lines(self) -> list[str]:
        """What is left on the screen: of a line that is written over, its last text."""
        return [line.rsplit("\r", 1)[-1] for line in self.text.replace("\r\n", "\n").split("\n")]

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, words: str, seconds: float = 30.0) -> None:
        """Read until `words` come after what was waited for before."""
        deadline = time.monotonic() + seconds
        while (found := self.text.find(words, self._seen)) < 0:
            assert time.monotonic() < deadline and self._read(0.5), (words, self.text)
        self._seen = found + len(words)

    def interrupt_until(self, words: str, seconds: float = 30.0) -> None:
        """Ctrl-C, again after a while: CPython's readline sees one that comes between its look at
        signals and its `select` at the next key only."""
        deadline = time.monotonic() + seconds
        while self.text.find(words, self._seen) < 0:
            assert time.monotonic() < deadline, (words, self.text)
            self.type("\x03")
            again = time.monotonic() + 2
            while self.text.find(words, self._seen) < 0 and time.monotonic() < again:
                assert self._read(0.2), self.text
        self.wait_for(words)

    def wait(self, seconds: float = 30.0) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + seconds
        while self._read(0.5):
            assert time.monotonic() < deadline, self.text
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, seconds: float) -> bool:
        """Whether more may come."""
        ready, _, _ = select.select([self._descriptor], [], [], seconds)
        if not ready:
            return self.process.poll() is None
        try:
            data = os.read(self._descriptor, 65536)
        except OSError:  # Linux's answer when the other end is closed
            return False
        self._bytes += data
        return bool(data)


@contextlib.contextmanager
def pseudo_terminal(
    command: Sequence[str | Path], *, columns: int = 80, rows: int = 24, **environment: str
) -> Iterator[PseudoTerminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def control() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C and hang-ups reach it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # which tests in the background ignore

    inherited = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR",)}
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=inherited | {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"} | environment,
        preexec_fn=control,
    )
    os.close(theirs)
    try:
        yield PseudoTerminal(process, ours)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(ours)
