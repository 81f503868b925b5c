"""Logging of the processes that serve HTTP, or fetch by it."""

from __future__ import annotations

import logging
from typing import Literal

import runtime.logs
from runtime.logs import LogOptions


def set_up_logging(
    level: str, form: Literal["text", "json"], *, log_requests: bool = False
) -> None:
    """Send everything from `level` up to stderr, and of the libraries what is of use.

    log_requests: the lines of requests as well, whatever the level
    """
    runtime.logs.set_up_logging(LogOptions(level, form))
    # The start report replaces the messages of uvicorn about its start and end.
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.root.level))
    # A line for each HTTP request of a download says nothing that its progress does not.
    for library in ("httpx", "httpx2"):
        logging.getLogger(library).setLevel(max(logging.WARNING, logging.root.level))
    if log_requests:
        logging.getLogger("wavefill.requests").setLevel(min(logging.INFO, logging.root.level))
