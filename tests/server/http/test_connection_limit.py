"""With all connections taken: who is closed, who is refused, and that probes are answered."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx2 as httpx
import pytest

from server.http.connection_limit import ConnectionLimit
from server.http.paths import WATCHING_PATHS
from tests.support.server.fake_engine import FakeServer, fake_server

MOST = 12  # three of them for probes
MAX_BUSY = 9
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
UNFINISHED = b"GET /livez HTTP/1.1\r\nhost: localhost\r\nx-slow: "
WHOLE = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with fake_server(tmp_path_factory.mktemp("tokenizer"), connections=MOST) as server:
        yield server


def connection(fake: FakeServer, *said: bytes) -> socket.socket:
    url = urlsplit(fake.url)
    opened = fake.closing(socket.create_connection((url.hostname, url.port), timeout=5))
    for part in said:
        opened.sendall(part)
    return opened


def is_closed(opened: socket.socket) -> bool:
    """Whether the server has closed it; anything it has answered is read."""
    opened.settimeout(5)
    try:
        while opened.recv(65536):
            opened.settimeout(0.05)
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


def wait_for_requests(fake: FakeServer, number: int) -> None:
    deadline = time.monotonic() + 10
    while fake.engine.num_open < number and time.monotonic() < deadline:
        time.sleep(0.005)
    assert fake.engine.num_open == number


def ask(fake: FakeServer) -> httpx.Response:
    return httpx.post(f"{fake.url}/v1/chat/completions", json=CHAT, timeout=20)


@pytest.mark.parametrize("said", [(), (UNFINISHED,), (WHOLE,)], ids=["silent", "slow", "kept"])
def test_idle_connections_make_room_for_others(fake: FakeServer, said: tuple[bytes, ...]):
    idle = [connection(fake, *said) for _ in range(3 * MOST)]
    for path in (*sorted(WATCHING_PATHS), "/v1/models"):
        assert httpx.get(fake.url + path, timeout=5).status_code == 200, path
    assert ask(fake).status_code == 200
    assert all(is_closed(one) for one in idle[:MOST])
    last = idle[-1]
    last.sendall(b"\r\n\r\n" if said == (UNFINISHED,) else WHOLE)
    assert last.recv(100).startswith(b"HTTP/1.1 200")


def test_a_request_in_flight_is_not_cut_for_a_new_connection(fake: FakeServer):
    fake.engine.held = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, fake)
        wait_for_requests(fake, 1)
        for _ in range(3 * MOST):
            connection(fake)
        assert httpx.get(f"{fake.url}/livez", timeout=1).status_code == 200
        fake.engine.held = False
        assert answer.result().status_code == 200


def test_requests_in_flight_leave_room_for_probes_and_for_a_proper_refusal(fake: FakeServer):
    fake.engine.held = True
    with ThreadPoolExecutor(MAX_BUSY) as pool:
        answers = [pool.submit(ask, fake) for _ in range(MAX_BUSY)]
        wait_for_requests(fake, MAX_BUSY)
        for _ in range(3 * MOST):
            connection(fake)
        for path in sorted(WATCHING_PATHS):
            assert httpx.get(fake.url + path, timeout=5).status_code == 200, path
        refused = ask(fake)
        metrics = httpx.get(f"{fake.url}/metrics", timeout=1).text
        fake.engine.held = False
        assert [answer.result().status_code for answer in answers] == [200] * MAX_BUSY
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1" and refused.headers["connection"] == "close"
    error = refused.json()["error"]
    assert error["type"] == "rate_limit_error" and error["code"] == "rate_limit_exceeded"
    assert f"{MAX_BUSY} connections" in error["message"]
    assert 'reason="connections_full"} 1.0' in metrics
    assert ask(fake).status_code == 200


class Caller:
    def __init__(self, unsent: bool = False) -> None:
        self.unsent = unsent
        self.is_cut = False

    def has_unsent_bytes(self) -> bool:
        return self.unsent

    def cut(self) -> None:
        self.is_cut = True


def test_who_still_reads_an_answer_is_spared_while_another_one_is_idle():
    limit = ConnectionLimit(3)
    reading, idle, busy = Caller(unsent=True), Caller(), Caller()
    for caller in (reading, idle, busy):
        limit.opened(caller)
    limit.request_begun(busy)
    limit.opened(Caller())
    assert idle.is_cut and not reading.is_cut
    limit.opened(Caller())
    limit.opened(Caller())
    assert not reading.is_cut and not busy.is_cut


def test_who_does_not_read_an_answer_makes_way_if_all_others_are_busy():
    limit = ConnectionLimit(2)
    reading, busy, newest = Caller(unsent=True), Caller(), Caller()
    limit.opened(reading)
    limit.opened(busy)
    limit.request_begun(busy)
    limit.opened(newest)
    assert reading.is_cut and not busy.is_cut and not newest.is_cut
