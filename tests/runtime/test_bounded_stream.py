"""Text to a pipe, socket or terminal that is not read for a while."""

from __future__ import annotations

import os
import pty
import re
import select
import socket
import subprocess
import sys
import tty
from typing import TextIO

import pytest

from runtime import bounded_stream
from runtime.bounded_stream import bounded

LINES = 3000  # of 100 bytes; a pipe takes 64 KiB
CODE = f"""
import logging, sys
from runtime.logs import LogOptions, set_up_logging
set_up_logging(LogOptions("info", sys.argv[1]))
for number in range({LINES}):
    logging.info("line %d %s", number, "x" * 60)
print("done", flush=True)
sys.stdin.readline()
logging.info("the last one")
raise RuntimeError("a traceback")
"""


def ends(kind: str) -> tuple[int, int]:
    """To read from, and to write to."""
    if kind == "pipe":
        return os.pipe()
    if kind == "socket":
        one, other = socket.socketpair()
        return one.detach(), other.detach()
    reader, writer = pty.openpty()
    tty.setraw(writer)
    return reader, writer


def read_all(descriptor: int) -> str:
    """What there is, and comes within a moment."""
    parts: list[bytes] = []
    while select.select([descriptor], [], [], 0.2)[0]:
        try:
            parts.append(os.read(descriptor, 1 << 16))
        except OSError:  # of a terminal that no process has open any more
            break
        if not parts[-1]:
            break
    return b"".join(parts).decode()


def read_on(descriptor: int, stream: TextIO) -> str:
    """The same, and what the stream has of a line that was cut."""
    text = ""
    while True:
        stream.flush()
        part = read_all(descriptor)
        if not part:
            return text
        text += part


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_log_that_is_not_read_stops_nothing_and_says_how_much_is_missing(form: str):
    command, pipe = [sys.executable, "-c", CODE, form], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin and process.stdout and process.stderr
        if not select.select([process.stdout], [], [], 60)[0]:
            process.kill()
        assert process.stdout.readline() == b"done\n"
        text = read_all(process.stderr.fileno())
        process.stdin.write(b"\n")
        process.stdin.flush()
        text += process.stderr.read().decode()
    assert process.returncode == 1
    assert ("WARNING wavefill.logs: " if form == "text" else '"level": "warning"') in text
    (missing,) = re.findall(r"lines are missing here \((\d+)\)", text)
    seen = [int(number) for number in re.findall(r"line (\d+) x{60}\b", text)]
    assert seen == list(range(len(seen))) and len(seen) + int(missing) == LINES
    assert "the last one" in text and text.endswith("RuntimeError: a traceback\n")


@pytest.mark.parametrize(
    ("kind", "own"), [("pipe", True), ("pipe", False), ("socket", True), ("terminal", True)]
)
def test_lines_are_whole_whatever_is_missing(kind: str, own: bool, monkeypatch: pytest.MonkeyPatch):
    if not own:  # as where the pipe belongs to another user
        monkeypatch.setattr(bounded_stream, "FOLDER", "/nowhere")
    reader, writer = ends(kind)
    with os.fdopen(writer, "w") as plain:
        stream = bounded(plain)
        assert stream.isatty() == (kind == "terminal") and stream.fileno() == writer
        text = ""
        for number in range(60):
            for part in (f"{number} ", "y" * 9000, "\n"):
                stream.write(part)
            if number % 25 == 24:
                text += read_on(reader, stream)
        text += read_on(reader, stream)
        stream.write("begun")
        text += read_on(reader, stream)
    lines = text.split("\n")
    assert lines.pop() == "begun"
    notes = [line for line in lines if line.startswith("lines are missing here")]
    missing = sum(int(number) for note in notes for number in re.findall(r"\d+", note))
    whole = [line for line in lines if re.fullmatch(r"\d+ y{9000}", line)]
    assert notes and len(whole) + len(notes) == len(lines) and len(whole) + missing == 60
    os.close(reader)


def test_a_reader_that_is_gone_is_no_error():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as plain:
        stream = bounded(plain)
        os.close(reader)
        print("unread", file=stream, flush=True)
