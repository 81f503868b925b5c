"""A model that is downloaded first: what the server answers meanwhile."""

from __future__ import annotations

import io
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import pytest

from server.cli import download_progress
from server.cli.download_progress import DownloadProgress
from server.cli.model_source import built_in_directory
from tests.support.server.fake_hub import FakeHub, fake_hub
from tests.support.server.launched_server import REQUEST, STUB_ENGINE, LaunchedServer, Start

BLOCK = 10 << 20  # the library reports once for each
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    """`org/model`, of whose weights the last third is held back."""
    names = ("config.json", "tokenizer.json", "tokenizer_config.json")
    files = {name: (built_in_directory() / name).read_bytes() for name in names}
    with fake_hub({**files, WEIGHTS: bytes(3 * BLOCK)}) as hub:
        hub.held = WEIGHTS
        yield hub


def downloading(start: Start, hub: FakeHub, home: Path, **options: object) -> LaunchedServer:
    return start(
        STUB_MODEL="org/model",
        HF_ENDPOINT=hub.url,
        HF_HOME=str(home),
        HF_HUB_OFFLINE="0",
        HF_HUB_DISABLE_XET="1",
        **options,
    )


def test_a_server_whose_model_is_downloaded_is_alive_and_says_how_far_it_is(
    start: Start, hub: FakeHub, tmp_path: Path
):
    launched = downloading(start, hub, tmp_path, api_workers=2)
    launched.wait_until(lambda: launched.status("/livez") == 200)
    launched.wait_until(  # until both processes know
        lambda: all("downloading 6" in launched.get("/readyz").text for _ in range(8))
    )
    for _ in range(8):
        loading = launched.get("/readyz")
        assert (loading.status_code, loading.json()["error"]["code"]) == (503, "loading")
        refused = httpx.post(f"{launched.url}/v1/completions", json=REQUEST)
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) >= 2
        found = refused.json()["error"]
        assert (found["type"], found["code"]) == ("server_error", "loading")
        assert re.search(r"not loaded yet \(downloading 6[56] %", found["message"]), found
    assert launched.status("/livez") == 200
    assert launched.status("/metrics") == 200
    assert not launched.has(STUB_ENGINE)
    hub.released.set()
    launched.wait_until(lambda: all(launched.status() == 200 for _ in range(8)))
    answer = httpx.post(f"{launched.url}/v1/completions", json={**REQUEST, "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
    first = launched.child("server.process.api_process")
    first.kill()  # the next one is told where the model is, too
    first.wait(5)
    launched.wait_until(lambda: all(launched.status() == 200 for _ in range(8)))


def test_a_wrong_model_name_ends_the_server_with_code_2_and_one_sentence(
    start: Start, hub: FakeHub, tmp_path: Path
):
    hub.status, hub.code = 401, "RepoNotFound"
    launched = downloading(start, hub, tmp_path)
    assert launched.process.wait(30) == 2
    [line] = launched.log.read_text().splitlines()
    assert line.startswith("error: org/model: the Hub has no such model, or it is private")


def test_a_server_whose_model_is_downloaded_stops_at_once_on_a_signal(
    start: Start, hub: FakeHub, tmp_path: Path
):
    launched = downloading(start, hub, tmp_path, drain_delay=60)
    launched.wait_until(lambda: launched.status("/livez") == 200)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(5) == 0
    assert "Traceback" not in launched.log.read_text()


def test_the_time_left_of_a_download_follows_from_its_speed(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(download_progress, "time", clock)
    reports: list[tuple[int, int, int | None]] = []
    progress = DownloadProgress("org/model", lambda: 1000, lambda *told: reports.append(told))
    progress.moved(200, 500)  # 200 were here, and the library knows of half of the files
    while progress.planned != 1000:
        pass
    now = 110.0
    progress.moved(600, 500)  # 40 a second
    assert reports[-1] == (600, 1000, 10)


def test_without_a_terminal_a_download_is_lines_of_the_log_from_its_begin_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    now = 100.0
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(download_progress, "time", clock)
    monkeypatch.setattr("sys.stderr", io.StringIO())
    with caplog.at_level("INFO"):
        progress = DownloadProgress("org/model", lambda: 1000 << 20, None)
        progress.moved(0, 500 << 20)
        while not caplog.records:
            pass
        now = 105.0
        progress.moved(300 << 20, 500 << 20)
        now = 110.0
        progress.moved(600 << 20, 700 << 20)
    lines = [record.getMessage() for record in caplog.records]
    begin, after = "org/model: downloading, 1000 MiB", "org/model: 600 of 1000 MiB are here"
    assert lines == [begin, after]
