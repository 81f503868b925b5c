"""Logging of every process of a server: one line an event, as text or as JSON, on stderr.

An event may have `fields` beside its message (`extra={"fields": {...}}`): members of the JSON
object, and `name=value` at the end of a line of text.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from functools import partial
from typing import Any, Literal, TextIO

import msgspec

from runtime.bounded_stream import bounded, missing

ERASE_LINE = "\r\033[K"  # on a terminal
PLAIN = re.compile(r"[!#-~]+")  # a value that needs no quotes: no space, no quote


class LogOptions(msgspec.Struct, frozen=True):
    """What the launcher passes on to other processes."""

    level: str = "info"
    form: Literal["text", "json"] = "text"


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        seconds, milliseconds = divmod(int(record.created * 1000), 1000)
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
            + f".{milliseconds:03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields_of(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = _fields_of(record).items()
        named = [f" {name}={_text(value)}" for name, value in fields if value is not None]
        return super().formatMessage(record) + "".join(named)


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Erases what a bar of this or another process has left on the line."""

    def format(self, record: logging.LogRecord) -> str:
        return ERASE_LINE + super().format(record)


def print_error(text: str) -> None:
    """Say why the process ends: as an event where the log is JSON.

    In one piece, since other processes write to the same stderr; over the bar of one of them.
    """
    if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers):
        logging.getLogger("wavefill").error("%s", text)
        return
    erased = ERASE_LINE if is_terminal(sys.stderr) else ""
    sys.stderr.write(f"{erased}error: {text}\n")
    sys.stderr.flush()


def is_terminal(stream: TextIO) -> bool:
    """Whether a person looks at it who can be shown lines that change."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def _fields_of(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _text(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def _missing(formatter: logging.Formatter, lines: int) -> str:
    fields = {"name": "wavefill.logs", "levelname": "WARNING", "msg": missing(lines)}
    return formatter.format(logging.makeLogRecord(fields)) + "\n"


def bound_stdout() -> None:
    """Let stdout wait for no reader from now on."""
    sys.stdout = bounded(sys.stdout)


def set_up_logging(options: LogOptions) -> None:
    """Send everything from the level up to stderr, of PyTorch warnings; stderr waits for no reader
    from now on."""
    formatter = JsonFormatter() if options.form == "json" else TextFormatter()
    if sys.stderr is sys.__stderr__:
        sys.stderr = bounded(sys.stderr, partial(_missing, formatter))
    handler = TerminalHandler() if is_terminal(sys.stderr) else logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    logging.getLogger("torch").setLevel(max(logging.WARNING, logging.root.level))
