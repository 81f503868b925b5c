"""What the processes that serve HTTP log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from server.process.logs import set_up_logging

REQUESTS = logging.getLogger("wavefill.requests")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(logging.root, "handlers", [])
    levels = {logger: logger.level for logger in (logging.root, REQUESTS)}
    REQUESTS.setLevel(logging.NOTSET)
    yield
    for logger, level in levels.items():
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("level", "log_requests", "written"),
    [("warning", False, []), ("warning", True, [logging.INFO]), ("debug", True, [10, 20])],
)
def test_lines_of_requests_are_written_whatever_the_level(
    level: str, log_requests: bool, written: list[int]
):
    set_up_logging(level, "text", log_requests=log_requests)
    found = [each for each in (logging.DEBUG, logging.INFO) if REQUESTS.isEnabledFor(each)]
    assert found == written
    assert logging.getLogger("wavefill.report").isEnabledFor(logging.INFO) == (level == "debug")
