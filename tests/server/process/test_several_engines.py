"""Several engines of one launcher, without models: who gets what, deaths, and what callers see."""

from __future__ import annotations

import signal
from concurrent.futures import Future, ThreadPoolExecutor

import httpx2 as httpx
import psutil
import pytest

from server.process.child import MAX_DEATHS
from tests.support.server.launched_server import (
    REQUEST,
    STUB_ENGINE,
    LaunchedServer,
    LineStream,
    Start,
    assert_all_end,
    serving,
)


def engines_of(launched: LaunchedServer) -> dict[str, psutil.Process]:
    """By the GPU that each would see."""
    found = [child for child in launched.children() if STUB_ENGINE in child.cmdline()]
    return {child.environ()["CUDA_VISIBLE_DEVICES"]: child for child in found}


def running(launched: LaunchedServer) -> dict[str, float]:
    """Sequences that each engine runs, by its index."""
    lines = launched.get("/metrics").text.splitlines()
    name = 'wavefill_requests_running{engine="'
    found = [line.removeprefix(name) for line in lines if line.startswith(name)]
    return {line[0]: float(line.rsplit(" ", 1)[1]) for line in found}


def states(launched: LaunchedServer) -> list[str]:
    answer = launched.get("/readyz")
    assert answer.status_code == 200
    return answer.json().get("engines", ["ready", "ready"])


def both_ready(start: Start, mode: str = "", **options: object) -> LaunchedServer:
    launched = serving(start, mode=mode, STUB_ENGINES="2", **options)
    launched.wait_until(lambda: launched.get("/readyz").json() == {"status": "ok"})
    return launched


def post(launched: LaunchedServer) -> httpx.Response:
    body = {**REQUEST, "max_tokens": 3}
    return httpx.post(f"{launched.url}/v1/completions", json=body, timeout=30)


@pytest.mark.parametrize("api_workers", [1, 2])
def test_requests_are_spread_over_the_engines(start: Start, api_workers: int):
    launched = both_ready(start, api_workers=api_workers, drain_seconds=1)
    streams = [LineStream(launched) for _ in range(4)]
    if api_workers == 1:  # one of several does not know what a silent stub has of the others
        launched.wait_until(lambda: running(launched) == {"0": 2, "1": 2})
    launched.wait_until(lambda: sum(running(launched).values()) == 4)
    info = launched.get("/server_info").json()
    assert info["max_running_requests"] == 128 and info["context_length"] == 4096
    loads = launched.get("/v1/loads").json()
    assert loads["dp_rank_count"] == 2
    assert [load["dp_rank"] for load in loads["loads"]] == [0, 1]
    launched.process.send_signal(signal.SIGTERM)
    for stream in streams:
        stream.ended()


def test_one_dead_engine_ends_what_it_had_begun_and_the_other_one_serves(start: Start):
    launched = both_ready(start)
    streams = [LineStream(launched) for _ in range(4)]
    launched.wait_until(lambda: running(launched) == {"0": 2, "1": 2})
    engines = engines_of(launched)
    assert set(engines) == {"0", "1"}
    engines["0"].kill()
    launched.wait_until(lambda: "ready" in states(launched) and len(set(states(launched))) == 2)
    assert launched.get("/readyz").json()["status"] == "degraded"
    assert launched.status("/livez") == 200 and post(launched).status_code == 200
    launched.wait_until(lambda: sum(not stream.is_alive() for stream in streams) == 2)
    broken = [stream for stream in streams if not stream.is_alive()]
    assert all("engine 0 ended with signal SIGKILL" in stream.ended()[-2] for stream in broken)
    launched.wait_until(lambda: launched.get("/readyz").json() == {"status": "ok"})
    assert engines_of(launched)["1"] == engines["1"], "it was never touched"
    assert sum(stream.is_alive() for stream in streams) == 2
    launched.wait_until(lambda: running(launched) == {"0": 0, "1": 2})
    LineStream(launched)
    launched.wait_until(lambda: running(launched) == {"0": 1, "1": 2})
    text = launched.get("/metrics").text
    for engine, restarts in (("0", 1.0), ("1", 0.0)):
        labels = f'{{engine="{engine}",model_name="tiny-chat"}}'
        assert f"wavefill_engine_restarts_total{labels} {restarts}" in text
    launched.process.kill()
    for stream in streams:
        stream.join(20)


def test_requests_that_had_not_begun_are_answered_by_another_engine(start: Start):
    launched = both_ready(start, mode="mute 0")
    with ThreadPoolExecutor(6) as pool:
        answers: list[Future[httpx.Response]] = [pool.submit(post, launched) for _ in range(6)]
        launched.wait_until(lambda: sum(answer.done() for answer in answers) == 3)
        launched.wait_until(lambda: running(launched) == {"0": 3, "1": 0})
        engines_of(launched)["0"].kill()
        for answer in answers:
            assert answer.result(20).json()["usage"]["completion_tokens"] == 3


def test_a_caller_that_goes_away_frees_the_engine_that_worked_for_it(start: Start):
    launched = both_ready(start, mode="mute")
    for _ in range(2):
        with pytest.raises(httpx.ReadTimeout):
            body = {**REQUEST, "max_tokens": 3}
            httpx.post(f"{launched.url}/v1/completions", json=body, timeout=0.3)
    launched.wait_until(lambda: running(launched) == {"0": 0, "1": 0})


def test_a_request_under_which_two_engines_have_died_is_not_tried_again(start: Start):
    launched = both_ready(start, mode="mute")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, launched)
        for engine in ("0", "1"):
            launched.wait_until(lambda engine=engine: running(launched)[engine] == 1)
            assert not answer.done()
            engines_of(launched)[engine].kill()
        refused = answer.result(20)
    assert refused.status_code == 500 and "ended with signal SIGKILL" in refused.text


def test_an_engine_that_keeps_dying_is_given_up_and_the_server_goes_on(start: Start):
    launched = serving(start, mode="broken 1", STUB_ENGINES="2")
    said = "the server goes on without engine 1: engines left: 1"
    launched.wait_until(lambda: said in launched.log.read_text(), 40)
    assert launched.log.read_text().count("RuntimeError: a seeded fault") == MAX_DEATHS
    assert launched.get("/readyz").json() == {"status": "degraded", "engines": ["ready", "down"]}
    assert post(launched).status_code == 200
    family = launched.children()
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(10) == 0
    assert_all_end(family, 1)


def test_a_wrong_configuration_ends_all_engines_with_code_2(start: Start):
    launched = start("wrong 1", STUB_ENGINES="2")
    family = launched.children()
    assert launched.process.wait(20) == 2
    assert_all_end(family, 2)


def test_a_drain_completes_the_answers_of_all_engines(start: Start):
    launched = both_ready(start)
    streams = [LineStream(launched, max_tokens=60) for _ in range(4)]
    launched.process.send_signal(signal.SIGTERM)
    for stream in streams:
        assert stream.ended()[-1] == "data: [DONE]" and not stream.broken
    assert launched.process.wait(10) == 0
