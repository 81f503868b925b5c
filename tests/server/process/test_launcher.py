"""The launcher and its children: deaths and exit codes, with an engine without a model."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import httpx2 as httpx
import pytest

from runtime.config import EngineConfig
from runtime.engine.process import note_ready
from server.config import ServerConfig
from server.process.api_process import READY, others_ready
from server.process.child import MAX_DEATHS, Child
from server.process.exclusive_files import LaunchError, store_lock
from server.process.launcher import Launcher
from server.process.messages import ApiProcessArgs
from tests.support.server.launched_server import (
    REQUEST,
    STUB_ENGINE,
    LineStream,
    Start,
    assert_all_end,
    serving,
)


def test_a_dead_engine_turns_health_off_until_it_is_replaced(start: Start):
    launched = serving(start)
    stream = LineStream(launched)
    engine = launched.child(STUB_ENGINE)
    engine.kill()
    launched.wait_until(lambda: launched.status() == 503)
    assert launched.status("/livez") == 200
    assert "SIGKILL" in stream.ended()[-2]
    launched.wait_until(lambda: launched.status() == 200)
    assert launched.child(STUB_ENGINE).pid != engine.pid
    answer = httpx.post(f"{launched.url}/v1/completions", json={**REQUEST, "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3
    info = launched.get("/server_info").json()
    assert info["engine"]["epoch"] == 2


def test_a_dead_api_process_is_replaced_on_the_same_port(start: Start):
    launched = serving(start)
    engine = launched.child(STUB_ENGINE)
    first = launched.child("server.process.api_process")
    first.kill()
    first.wait(5)
    launched.wait_until(lambda: launched.status() == 200)
    assert launched.child(STUB_ENGINE).pid == engine.pid
    answer = httpx.post(f"{launched.url}/v1/completions", json={**REQUEST, "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_there_is_an_api_process_that_answers_before_an_engine_is_ready(tmp_path: Path):
    config = ServerConfig(api_workers=3, engine=EngineConfig(model=""))
    with (
        socket.socket() as listener,
        closing(Launcher(config, listener, tmp_path, "no.engine", "", None)) as launcher,
    ):
        assert [at_once(launcher, index) for index in range(3)] == [True, False, False]
        assert at_once(launcher, 0), "process 0 died while the engine loads: the others wait for it"
        (tmp_path / "taking-1").touch()  # process 1 does so when the engine is ready
        assert not at_once(launcher, 0), "process 1 answers meanwhile"
        assert at_once(launcher, 1), "processes 0 and 2 wait"


def test_a_process_joins_those_that_take_connections_when_all_of_them_are_ready(tmp_path: Path):
    own, other = tmp_path / "taking-1", tmp_path / "taking-0"
    assert others_ready(own)
    other.touch()
    own.write_text(READY)
    assert not others_ready(own), "process 0 takes connections and still refuses requests"
    other.write_text(READY)
    assert others_ready(own)


def at_once(launcher: Launcher, index: int) -> bool:
    """Whether API process `index`, if it were started now, would answer without an engine."""
    starts: list[ApiProcessArgs] = []

    async def start(message: ApiProcessArgs) -> None:
        starts.append(message)

    with mock.patch.object(Child, "start", staticmethod(start)):
        asyncio.run(launcher.start_api(index))
    return starts[0].at_once


async def test_a_process_that_cannot_be_started_again_at_once_is_tried_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config = ServerConfig(engine=EngineConfig(model=""))
    monkeypatch.setattr(Child, "wait", mock.AsyncMock(side_effect=[1, 0]))
    monkeypatch.setattr(asyncio, "sleep", mock.AsyncMock())
    no_process = BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    no_thread = RuntimeError("can't start new thread")
    failures = [*[no_process] * 1100, no_thread]  # as after nine hours
    start = mock.AsyncMock(side_effect=[*failures, None])
    with (
        socket.socket() as listener,
        closing(Launcher(config, listener, tmp_path, "no.engine", "", None)) as launcher,
    ):
        child = Child("the engine", "nothing")
        assert await launcher._watch(child, start, lambda code: None, done=(0,)) == 0
    assert start.await_count == len(failures) + 1
    said = "the engine cannot be started: [Errno 11] Resource temporarily unavailable: next try in"
    assert said in caplog.text


@pytest.mark.parametrize("which", ["API process 0", "the engine"])
async def test_a_first_process_that_cannot_be_started_ends_the_server_and_says_why(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stopped: list[str] = []

    async def start(child: Child, message: object) -> None:
        if child.name == which:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    async def wait(child: Child) -> int:
        await asyncio.Event().wait()
        return 0

    async def stop(child: Child, seconds: float) -> None:
        stopped.append(child.name)

    for name, replacement in (("start", start), ("wait", wait), ("stop", stop)):
        monkeypatch.setattr(Child, name, replacement)
    config = ServerConfig(api_workers=2, engine=EngineConfig(model=""), model_directory="m")
    with socket.socket() as listener:
        launcher = Launcher(config, listener, tmp_path, "no.engine", "", None)
        with closing(launcher), pytest.raises(LaunchError, match=f"{which}( process)? cannot be"):
            await launcher.run()
    assert {"API process 0", "API process 1", "the engine"} <= {*stopped}


def test_several_api_processes_share_the_port_the_engine_and_the_counters(start: Start):
    launched = start(api_workers=3)
    launched.wait_until(lambda: all(launched.status() == 200 for _ in range(20)))
    assert (
        sum("server.process.api_process" in child.cmdline() for child in launched.children()) == 3
    )
    for _ in range(24):  # each on a connection of its own
        answer = httpx.post(f"{launched.url}/v1/completions", json={**REQUEST, "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
    for _ in range(6):  # whichever of them is asked
        text = launched.get("/metrics").text
        for start in ("wavefill_requests_total{", 'vllm:request_success_total{engine="0",'):
            assert f'{start}finished_reason="length",model_name="tiny-chat"}} 24.0' in text
        name, labels = "vllm:request_generation_tokens_count", 'engine="0",model_name="tiny-chat"'
        assert f"{name}{{{labels}}} 24.0" in text
    (directory,) = launched.folder.iterdir()
    names = {"taking-0", "taking-1", "taking-2"}
    launched.wait_until(lambda: {path.name for path in directory.glob("taking-*")} == names)
    many = {**REQUEST, "prompt": ["a"] * 1000, "max_tokens": 1}  # of 1024 for all of them
    answer = httpx.post(f"{launched.url}/v1/completions", json=many, timeout=60)
    assert len(answer.json()["choices"]) == 1000, answer.text[:500]
    assert answer.headers["x-ratelimit-limit-requests"] == "342"
    streams = [LineStream(launched, max_tokens=60) for _ in range(4)]
    family = launched.children()
    launched.process.send_signal(signal.SIGTERM)
    for stream in streams:
        assert stream.ended()[-1] == "data: [DONE]" and not stream.broken
    assert launched.process.wait(10) == 0
    assert_all_end(family, 1)


def test_one_server_has_its_response_store_to_itself_until_it_dies(start: Start, tmp_path: Path):
    store = tmp_path / "store"
    launched = serving(start, api_workers=2, store=str(store))
    launched.wait_until(store.exists)
    (tmp_path / "link").symlink_to(store)
    for name in (store, tmp_path / "link"):
        with pytest.raises(LaunchError, match="another server"), store_lock(str(name)):
            pass
    assert len(launched.children()) == 3, "its two API processes and the engine share the file"
    launched.process.kill()
    launched.process.wait(5)
    with store_lock(str(store)):
        pass


def test_a_response_store_where_no_file_can_be_made_is_named_at_the_start(tmp_path: Path):
    store = str(tmp_path / "no" / "folder")
    with (
        pytest.raises(LaunchError, match=f"--response-store {store}: No such file"),
        store_lock(store),
    ):
        pass


def test_a_wrong_configuration_of_the_engine_ends_all_with_code_2(start: Start):
    launched = start("wrong")
    assert launched.process.wait(20) == 2
    assert launched.log.read_text().count("error: --device moon") == 1


def test_while_loading_health_says_what_is_being_loaded(start: Start):
    launched = start("loading")
    launched.wait_until(lambda: launched.status() == 503)
    launched.wait_until(lambda: "load weights 25 %" in launched.get("/readyz").text)
    assert launched.status("/livez") == 200
    assert httpx.post(f"{launched.url}/v1/completions", json=REQUEST).status_code == 503


def test_a_server_that_is_still_loading_stops_at_once_on_a_signal(start: Start):
    launched = start("loading", drain_delay=60, drain_seconds=60)
    launched.wait_until(lambda: launched.status() == 503)
    family = launched.children()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(5) == 0
    assert_all_end(family, 1)


@pytest.mark.parametrize("mode", ["", "loading"])
def test_no_child_outlives_a_launcher_that_was_killed(start: Start, mode: str):
    launched = start(mode)
    launched.wait_until(lambda: launched.status() == (503 if mode else 200))
    family = launched.children()
    assert len(family) == 2
    os.kill(launched.process.pid, signal.SIGKILL)
    launched.process.wait(5)
    assert_all_end(family, 5)


def test_the_sockets_are_for_this_user_only_and_gone_at_the_end(start: Start):
    launched = serving(start)
    (directory,) = launched.folder.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    names = {path.name for path in directory.iterdir()}
    assert {"api-0.0", "engine-0", "responses"} <= names
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(10) == 0
    assert list(launched.folder.iterdir()) == []


def pauses_of(child: Child, monkeypatch: pytest.MonkeyPatch, lives: int, load: float, serve: float):
    """What `died` says after each of these lives, of which only the clock is played."""
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("server.process.child.time", clock)

    async def no_process(*arguments: object, **options: object) -> mock.Mock:
        return mock.Mock(stdin=mock.Mock(drain=mock.AsyncMock()))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", no_process)
    now, pauses = 100.0, list[float | None]()
    for _ in range(lives):
        asyncio.run(child.start({}))
        now += load
        if serve and child.ready_file is not None:
            note_ready(str(child.ready_file), now)
        now += serve
        pauses.append(child.died())
    return pauses


@pytest.mark.parametrize("serve", [0.0, 2.0])
def test_an_engine_that_loads_for_long_and_dies_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: float
):
    child = Child("the engine", "nothing", ready_file=tmp_path / "serving-0")
    pauses = pauses_of(child, monkeypatch, MAX_DEATHS, load=300.0, serve=serve)
    assert pauses == [0.5, 1.0, 2.0, 4.0, None]


@pytest.mark.parametrize("is_engine", [True, False])
def test_a_child_that_dies_now_and_then_is_restarted_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_engine: bool
):
    child = Child("it", "nothing", ready_file=tmp_path / "serving-0" if is_engine else None)
    load = 5.0 if is_engine else 0.0
    assert pauses_of(child, monkeypatch, 9, load=load, serve=60.0) == [0.5] * 9


def test_a_child_that_keeps_dying_is_restarted_with_growing_delays_and_then_abandoned():
    child = Child("the engine", "nothing")
    pauses = [child.died() for _ in range(MAX_DEATHS)]
    assert pauses[-1] is None
    waits = [pause for pause in pauses if pause is not None]
    assert len(waits) == MAX_DEATHS - 1
    assert all(later == 2 * sooner for sooner, later in pairwise(waits))


def test_tokenizers_of_children_start_no_threads_unless_the_environment_asks_for_them(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    assert (
        Child("api", "server.process.api_process").environment["TOKENIZERS_PARALLELISM"] == "false"
    )
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    assert (
        Child("api", "server.process.api_process").environment["TOKENIZERS_PARALLELISM"] == "true"
    )
