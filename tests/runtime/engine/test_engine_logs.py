"""What the processes of an engine log."""

from __future__ import annotations

import json
import logging
import signal
from typing import Any

import pytest

from runtime.config import EngineConfig
from runtime.engine import process, rank_process
from runtime.engine.followers import RankArgs
from runtime.engine.process import EngineProcessArgs
from runtime.logs import LogOptions, print_error, set_up_logging

LOGS: Any = {"config": EngineConfig(model=""), "logs": LogOptions("warning", "json")}


@pytest.mark.parametrize(
    ("module", "args"),
    [
        (process, EngineProcessArgs(own_address="", client_addresses=[], epoch=1, **LOGS)),
        (rank_process, RankArgs(rank=1, store="", memory=0, pipe=0, **LOGS)),
    ],
)
def test_what_an_engine_logs_is_of_the_level_and_form_of_the_server(
    module: Any, args: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    def work(args: object) -> None:
        logging.getLogger("wavefill.scheduler").info("below the level")
        logging.getLogger("wavefill.scheduler").warning("one %s", "event")

    for name, value in (("handlers", []), ("level", logging.WARNING)):
        monkeypatch.setattr(logging.root, name, value)
    monkeypatch.setattr(signal, "signal", lambda *handler: None)
    monkeypatch.setattr(module.parent_watch, "read_args", lambda kind: args)
    monkeypatch.setattr(module, "serve" if module is process else "run", work)
    module.main()
    event = json.loads(capfd.readouterr().err)
    assert (event["level"], event["message"]) == ("warning", "one event")


def test_why_a_process_ends_is_an_event_where_the_log_is_json(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for name, value in (("handlers", []), ("level", logging.WARNING)):
        monkeypatch.setattr(logging.root, name, value)
    set_up_logging(LogOptions("error", "json"))
    print_error("100% of the memory is taken")
    event = json.loads(capfd.readouterr().err)
    assert (event["level"], event["message"]) == ("error", "100% of the memory is taken")


def test_pytorch_logs_warnings_only(monkeypatch: pytest.MonkeyPatch):
    for name, value in (("handlers", []), ("level", logging.WARNING)):
        monkeypatch.setattr(logging.root, name, value)
    set_up_logging(LogOptions())
    assert not logging.getLogger("torch._subclasses.fake_tensor").isEnabledFor(logging.INFO)
    assert logging.getLogger("wavefill.report").isEnabledFor(logging.INFO)
