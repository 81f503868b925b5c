"""How a start is shown: a bar on a terminal, dated lines elsewhere."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runtime.config import EngineConfig
from runtime.messages import Progress
from runtime.startup.loading import load
from server.cli.model_source import built_in_directory
from server.cli.terminal import ProgressLine
from server.config import ServerConfig
from server.loaded_model import PHASES
from server.process.logs import set_up_logging
from server.process.report.loading_report import ORDER, LoadingReport, share_of_start
from server.process.report.start_report import Reporter
from tests.support.cli.pseudo_terminal import pseudo_terminal
from tests.support.server.fake_engine import ReportedClient
from tests.support.server.server_process import free_port

COMMAND = Path(sys.executable).parent / "wavefill"
ERASE = "\r\033[K"
DATED = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO wavefill\.report: "


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    monkeypatch.setattr("server.cli.terminal.MIN_REDRAW_SECONDS", 0)
    monkeypatch.setenv("TERM", "xterm")
    return FakeTerminal()


def test_on_a_terminal_one_line_is_written_over_and_is_gone_at_the_end(
    terminal: FakeTerminal, caplog: pytest.LogCaptureFixture
):
    report = LoadingReport(json=False, line=ProgressLine(terminal))
    with caplog.at_level("INFO"):
        report.show(Progress("kernels", 0, 1))
        report.show(Progress("weights", 50, 100))
        report.end()
    assert "compiling kernels, 0 s" in terminal.getvalue()
    assert " 50%  loading weights, 0 s" in terminal.getvalue()  # the fifth of nine, half done
    assert terminal.getvalue().endswith(ERASE) and "\n" not in terminal.getvalue()
    assert caplog.records == []


async def test_the_bar_is_gone_when_a_server_stops_while_it_loads(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stderr", terminal)
    client = ReportedClient(progress=Progress("weights", 1, 9))
    reporter = asyncio.create_task(Reporter(ServerConfig(), client).run())  # type: ignore[arg-type]
    while "loading weights" not in terminal.getvalue():
        await asyncio.sleep(0.01)
    reporter.cancel()
    await asyncio.gather(reporter, return_exceptions=True)
    assert terminal.getvalue().endswith(ERASE)


def test_a_line_of_the_log_on_a_terminal_replaces_the_bar(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.root, "level", logging.WARNING)
    LoadingReport(json=False).show(Progress("weights", 1, 9))
    set_up_logging("warning", "text")
    logging.getLogger("any").warning("something")
    assert re.search(
        r"loading weights, 0 s\r\033\[K20.* WARNING any: something\n$", terminal.getvalue()
    )


def test_the_share_of_a_start_grows_from_phase_to_phase():
    shares = [share_of_start(Progress(phase, 0, 1)) for phase in ORDER]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] < 1
    assert share_of_start(Progress("something else")) is None


def test_a_json_log_gets_lines_also_on_a_terminal(caplog: pytest.LogCaptureFixture):
    report = LoadingReport(json=True, line=ProgressLine(FakeTerminal()))
    with caplog.at_level("INFO"):
        report.show(Progress("warm-up", 0, 1))
    assert [record.getMessage() for record in caplog.records] == ["warming up"]


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_phases_of_a_start_are_known_and_come_in_their_order(on: str):
    seen: dict[str, None] = {}
    model = str(built_in_directory())
    config = EngineConfig(model=model, device=on, kv_tokens=1024)  # type: ignore[arg-type]
    load(config, lambda phase, done, total: seen.update({phase: None}))
    assert list(seen) == [phase for phase in PHASES if phase in seen]
    assert {"device", "model", "weights", "warm-up"} <= {*seen}
    assert on == "cpu" or {*seen} == {*ORDER} - {"starting"}


def test_a_start_on_a_terminal_leaves_no_bar_and_the_report_follows_on_a_line_of_its_own():
    """The bar itself: above.  A start of a second may end before it is drawn."""
    with pseudo_terminal([COMMAND, "serve", "--port", str(free_port())]) as screen:
        screen.wait_for("ready ")
        screen.type("\x03")
        assert screen.wait() == 0
    assert not re.search(DATED, screen.text)
    assert not any(re.search(r"%  .*, \d+ s$", line) for line in screen.lines)
    assert re.search(r"^wavefill \S+  tiny-chat", "\n".join(screen.lines), re.MULTILINE)


def test_a_start_elsewhere_is_dated_lines_on_stderr(tmp_path: Path):
    log, report = tmp_path / "log", tmp_path / "report"
    command = [COMMAND, "serve", "--port", str(free_port())]
    with log.open("wb") as errors, report.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        try:
            deadline = time.monotonic() + 60
            while "ready " not in report.read_text():
                assert time.monotonic() < deadline and process.poll() is None, log.read_text()
                time.sleep(0.1)
        finally:
            process.terminate()
            process.wait(30)
    lines = log.read_text().splitlines()
    # A phase that is over before the report looks at it has no line.
    assert re.search(r"wavefill\.report: \S+", lines[0]) and "\033" not in log.read_text()
    assert all(re.match(DATED, line) for line in lines), lines
