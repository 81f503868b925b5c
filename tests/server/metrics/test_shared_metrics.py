"""Metrics of several API processes, which count in one folder."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

from runtime.config import EngineConfig
from runtime.messages import Ready
from runtime.stats import Stats
from server.config import ServerConfig
from server.metrics.metrics import Metrics
from server.metrics.shared_files import reserve
from server.process.exclusive_files import LaunchError, reserve_metrics
from tests.support.server.scrape import ready, values


def test_what_several_processes_counted_is_summed(tmp_path: Path):
    count = """
import sys
from server.metrics.buffered_histogram import BufferedHistogram
from server.metrics.families import PER_TOKEN_BUCKETS
from server.metrics.metrics import Metrics
metrics = Metrics("tiny", shared=sys.argv[1])
times = {"arrived": 100.0, "started": 100.1, "first_token": 100.2, "ended": 101.0}
metrics.request_finished("stop", 10, 5, **times)
metrics.http_request("/health", 200, 0.1)
print(metrics.render().decode())
"""
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", "-c", count, str(tmp_path)]
    for _ in range(3):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    for line in (
        'wavefill_requests_total{finished_reason="stop",model_name="tiny"} 3.0',
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="tiny"} 3.0',
        'wavefill_http_requests_total{code="200",model_name="tiny",route="/health"} 3.0',
        'wavefill_request_generation_tokens_sum{model_name="tiny"} 15.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.25",model_name="tiny"} 3.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 3.0',
    ):
        assert line in done.stdout.splitlines(), done.stdout
    assert done.stdout.count("# TYPE wavefill_requests_total") == 1


def engine_totals(metrics: Metrics) -> list[float]:
    """The engine's counters, and its histograms of one step."""
    found = values(metrics)
    names = ("generation_tokens_total", "engine_steps_total", "engine_step_seconds_sum")
    return [found[f"wavefill_{name}"] for name in (*names, "iteration_tokens_count")]


def stats_of(steps: int) -> Stats:
    return Stats(
        steps=steps,
        generated_tokens=10 * steps,
        step_seconds_sum=0.5 * steps,
        step_tokens_counts=(steps, *(0,) * 15),
    )


class Seen:
    """What an API process knows of the engine."""

    def __init__(self, shared: Path | None) -> None:
        self.shared = shared
        self.engine: Ready | None = ready()
        self.stats = Stats()
        self.metrics = Metrics("tiny", compat="none", shared=str(shared or ""))
        self.metrics.watch(
            ready=lambda: self.engine, stats=lambda: self.stats, state=lambda: "ready"
        )


@pytest.fixture
def two(tmp_path: Path) -> tuple[Seen, Seen]:
    """API processes that count in one folder."""
    return Seen(tmp_path), Seen(tmp_path)


def test_the_engines_counters_are_never_less_than_another_process_has_shown(
    two: tuple[Seen, Seen],
):
    one, other = two
    one.stats, other.stats = stats_of(4), stats_of(3)
    assert engine_totals(one.metrics) == engine_totals(other.metrics) == [40, 4, 2.0, 4]
    other.stats = stats_of(5)
    assert engine_totals(other.metrics) == engine_totals(one.metrics) == [50, 5, 2.5, 5]
    started_again = Seen(one.shared)
    started_again.engine = None
    assert engine_totals(started_again.metrics) == [50, 5, 2.5, 5]


@pytest.mark.parametrize("shared", [True, False])
def test_the_engines_counters_go_on_when_it_is_started_again(two: tuple[Seen, Seen], shared: bool):
    one, other = two if shared else (Seen(None), None)
    one.stats = stats_of(4)
    assert engine_totals(one.metrics) == [40, 4, 2.0, 4]
    one.engine, one.stats = None, Stats()
    assert engine_totals(one.metrics) == [40, 4, 2.0, 4]
    one.engine, one.stats = structs.replace(ready(), epoch=2), stats_of(1)
    assert engine_totals(one.metrics) == [50, 5, 2.5, 5]
    if other is not None:
        other.stats = stats_of(3)  # it has not heard of the new engine
        assert engine_totals(other.metrics) == [50, 5, 2.5, 5]


def test_the_files_that_processes_count_in_have_room_for_all_series_from_the_start(tmp_path: Path):
    count = """
import sys
from server.metrics.shared_files import count_as
count_as(int(sys.argv[2]))
from server.metrics.metrics import Metrics
metrics = Metrics("tiny" * 50, shared=sys.argv[1])
for index in range(80):
    for code in (200, 400, 503):
        metrics.http_request(f"/v1/chat/completions/{index}", code, 0.1)
print(metrics.render().decode())
"""
    folder = tmp_path / "metrics"
    reserve(folder, 2, "tiny" * 50)
    made = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert set(made) == {f"{kind}_{n}.db" for kind in ("counter", "histogram") for n in (0, 1)}
    assert all(path.stat().st_blocks * 512 >= made[path.name] for path in folder.iterdir())
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder)}
    for index in ("0", "1", "1"):  # process 1 was started again
        command = [sys.executable, "-c", count, str(folder), index]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    name = f'code="503",model_name="{"tiny" * 50}",route="/v1/chat/completions/7"'
    assert f"wavefill_http_requests_total{{{name}}} 3.0" in done.stdout.splitlines()
    assert {path.name: path.stat().st_size for path in folder.glob("*.db")} == made


def test_counters_are_shown_while_the_disk_has_no_room_for_them(
    two: tuple[Seen, Seen], monkeypatch: pytest.MonkeyPatch
):
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    one, _ = two
    monkeypatch.setattr(Path, "write_bytes", full)
    one.stats = stats_of(4)
    assert engine_totals(one.metrics) == [40, 4, 2.0, 4]


def test_a_start_without_room_for_the_metrics_says_how_much_they_need(tmp_path: Path):
    config = ServerConfig(api_workers=3, engine=EngineConfig(model=""))
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "metrics"
    with pytest.raises(LaunchError, match="--api-workers 3 take about 6 MB here: make room, or"):
        reserve_metrics(folder, config)
