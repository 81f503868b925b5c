"""What a server does when clients disconnect, when it is stopped, and when a process dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import httpx2 as httpx
import psutil
import pytest
from openai import APIError

from tests.support.server.server_process import Server

Start = Callable[..., Server]
ENDLESS = {"model": "tiny-chat", "prompt": "once upon", "max_tokens": 1500, "ignore_eos": True}


def idle(server: Server) -> bool:
    return (
        server.metric("wavefill_requests_running")
        == 0
        == server.metric("wavefill_kv_cache_usage_ratio")
    )


def children(server: Server) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children(recursive=True)


def engine_of(server: Server) -> psutil.Process:
    return next(child for child in children(server) if "runtime.engine.process" in child.cmdline())


def test_a_dropped_stream_frees_its_pages(server: Server):
    before = server.metric("wavefill_generation_tokens_total")
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}
    ) as response:
        next(response.iter_lines())
    server.wait_until(lambda: idle(server))
    assert server.metric("wavefill_generation_tokens_total") - before < ENDLESS["max_tokens"] / 2


def test_a_dropped_plain_request_frees_its_pages(server: Server):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=0.5)
    server.wait_until(lambda: idle(server))


def test_more_requests_than_slots_all_end(server: Server):
    results: list[int] = []

    def one(index: int) -> None:
        body = {**ENDLESS, "prompt": f"story {index}", "max_tokens": 20}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        results.append(answer.json()["usage"]["completion_tokens"])

    threads = [threading.Thread(target=one, args=(index,)) for index in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [20] * 100
    assert idle(server)


def test_an_idle_server_uses_no_processor_time(server: Server):
    server.wait_until(lambda: idle(server))
    time.sleep(0.5)

    def used() -> float:
        processes = [psutil.Process(server.process.pid), *children(server)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    before = used()
    time.sleep(3)
    assert used() - before < 0.15


def test_sigterm_lets_a_stream_finish_and_exits_with_0(own_server: Start):
    server = own_server()
    stream = server.client().completions.create(
        model="tiny-chat",
        prompt="once upon",
        max_tokens=150,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    next(stream)
    server.process.send_signal(signal.SIGTERM)
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
    assert usage is not None and usage.completion_tokens == 150
    assert server.process.wait(20) == 0
    assert "stopping: open requests (1) have 30 s to end; a second" in server.log.read_text()


def test_a_killed_engine_ends_its_streams_and_is_replaced(own_server: Start):
    server = own_server()
    stream = server.client().completions.create(
        model="tiny-chat",
        prompt="once upon",
        max_tokens=1500,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(stream)
    engine_of(server).kill()
    with pytest.raises(APIError):
        for _ in stream:
            pass
    server.wait_until(lambda: not server.ready())
    server.wait_until(server.ready, 30)
    answer = server.client().completions.create(model="tiny-chat", prompt="hi", max_tokens=3)
    assert answer.usage and answer.usage.completion_tokens > 0
    assert (
        "ended with signal SIGKILL: the system may have run out of memory" in server.log.read_text()
    )


@pytest.mark.parametrize("busy", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_frozen_engine_is_unhealthy_until_it_goes_on(own_server: Start, busy: bool):
    server = own_server("--stall-seconds", "2")
    if busy:
        stream = server.client().completions.create(
            model="tiny-chat",
            prompt="once upon",
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
    engine = engine_of(server)
    engine.suspend()
    server.wait_until(lambda: httpx.get(f"{server.url}/livez").status_code == 503)
    assert not server.ready()
    engine.resume()
    server.wait_until(server.ready, 30)


def test_no_child_outlives_a_killed_launcher(own_server: Start):
    server = own_server()
    family = children(server)
    assert len(family) >= 2
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(5)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
