"""Logging: one line an event, as text or as JSON, on stderr."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


def set_up_logging(level: str, form: Literal["text", "json"]) -> None:
    """Send everything from `level` up to stderr."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S")
    handler.setFormatter(JsonFormatter() if form == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # The start report replaces the messages of uvicorn about its start and end.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))
    # A line for each HTTP request of a download says nothing that its progress does not.
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.root.level))
