"""What rank 0 does when another rank, or a step, does not end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from model_zoo.layers.error_text import first_line
from runtime.config import ConfigError
from runtime.engine import rank_process
from runtime.engine.followers import (
    CONFIGURATION_ERROR,
    OUT_OF_MEMORY,
    STALL_SECONDS,
    START_STALL_SECONDS,
    StallWatch,
)
from runtime.engine.progress_report import ProgressReport
from runtime.logs import LogOptions


def test_a_loop_that_does_not_come_round_ends_the_process_with_a_message():
    ended, said = threading.Event(), []

    def end(message: str) -> None:
        said.append(message)
        ended.set()

    StallWatch(end, 0.05, look_seconds=0.01)
    assert ended.wait(20)
    assert said == ["the start has not gone on for 0 s: a rank hangs; all ranks start again"]


def test_after_the_start_a_step_that_does_not_end_is_what_ends_the_process():
    ended, said = threading.Event(), []

    def end(message: str) -> None:
        said.append(message)
        ended.set()

    watch = StallWatch(end, 3600.0, look_seconds=0.01)
    assert not ended.wait(0.1)
    watch.watch_steps(0.05)
    assert ended.wait(20)
    assert said == ["a step has not ended for 0 s: a rank hangs; all ranks start again"]


@pytest.mark.parametrize("followers", [None, SimpleNamespace(fail=lambda message: None)])
def test_a_start_is_watched_once_all_ranks_have_loaded_their_weights(
    followers: Any, monkeypatch: pytest.MonkeyPatch
):
    report = ProgressReport(lambda message: None, followers)
    for phase in ("device", "model", "kernels", "weights", "gemms"):
        report(phase, 0, 1)
        assert report._watch is None
    report("memory", 0, 1)
    watch = report._watch
    assert (watch is None) == (followers is None)
    if watch is not None:
        assert watch._seconds == START_STALL_SECONDS
        monkeypatch.setattr(watch, "_seen", 0.0)
        report("graphs", 0, 1)
        assert report._watch is watch and watch._seen > 0.0
    assert report.started() is watch
    assert watch is None or watch._seconds == STALL_SECONDS


def test_a_loop_that_comes_round_is_left_alone():
    ended = threading.Event()
    watch = StallWatch(lambda message: ended.set(), 0.5, look_seconds=0.01)
    for _ in range(20):
        watch.alive()
        assert not ended.wait(0.05)


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (ConfigError("--dtype: no"), "rank 1: --dtype: no", CONFIGURATION_ERROR),
        (ValueError("a shape\nand more"), "rank 1: ValueError: a shape", 1),
        (MemoryError(), f"rank 1: {OUT_OF_MEMORY}: MemoryError", 1),
        (torch.OutOfMemoryError(), f"rank 1: {OUT_OF_MEMORY}: OutOfMemoryError", 1),
    ],
)
def test_the_last_line_of_a_rank_says_which_it_is_and_what_went_wrong(
    error: Exception,
    line: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    def run(args: object) -> None:
        raise error

    monkeypatch.setattr(rank_process, "run", run)
    monkeypatch.setattr(rank_process, "SILENT_SECONDS", 0.0)
    monkeypatch.setattr(rank_process.signal, "signal", lambda *handler: None)
    args = SimpleNamespace(rank=1, logs=LogOptions())
    monkeypatch.setattr(rank_process.parent_watch, "read_args", lambda kind: args)
    monkeypatch.setattr(rank_process, "set_up_logging", lambda logs: None)
    with pytest.raises(SystemExit) as ended:
        rank_process.main()
    assert ended.value.code == code
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == f"error: {line}"
    assert ("Traceback" in said) == ("ValueError" in line)


def test_an_error_without_text_is_named_by_its_type():
    assert first_line(RuntimeError("\n  no room \nat all")) == "no room "
    assert first_line(RuntimeError("\n")) == first_line(RuntimeError()) == "RuntimeError"
