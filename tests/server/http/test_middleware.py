"""What the middleware does before every route: limits of requests, the request id, the drain."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest

from server.http import middleware
from server.state import ServerState
from tests.support.server.fake_engine import FakeServer, fake_server
from tests.support.server.malformed_requests import error

APP = "https://app.example"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[FakeServer]:
    limits = {"max_body_bytes": 2000, "max_header_bytes": 4000}
    with fake_server(tmp_path, **limits) as fake:
        yield fake


def test_a_request_id_is_sent_back_or_made(small: FakeServer):
    named = httpx.get(f"{small.url}/health", headers={"x-request-id": "my-id.1"})
    assert named.headers["x-request-id"] == "my-id.1"
    made = [httpx.get(f"{small.url}/health").headers["x-request-id"] for _ in range(2)]
    assert len(set(made)) == 2
    bad = httpx.get(f"{small.url}/health", headers={"x-request-id": "a b" + "c" * 200})
    assert len(bad.headers["x-request-id"]) == 32


def test_a_declared_body_over_the_limit_is_413(small: FakeServer):
    answer = httpx.post(f"{small.url}/v1/chat/completions", content=b" " * 2001)
    assert answer.status_code == 413
    assert error(answer)["code"] == "request_too_large"


async def test_an_undeclared_body_over_the_limit_is_413(small: FakeServer):
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    async with httpx.AsyncClient() as client:
        answer = await client.post(
            f"{small.url}/v1/chat/completions",
            content=endless(),
            headers={"content-type": "application/json"},
        )
    assert answer.status_code == 413


def test_bodies_that_are_too_large_together_are_429(
    small: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(middleware, "MAX_BODIES", 2)
    address = small.url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2000\r\n"
    head += b"content-type: application/json\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(2):  # that have not sent all of theirs
            sending = stack.enter_context(socket.create_connection((address[0], int(address[1]))))
            sending.sendall(head + b" " * 1999)
        for _ in range(100):
            answer = httpx.post(f"{small.url}/v1/chat/completions", json=CHAT)
            if answer.status_code == 429:
                break
        assert answer.status_code == 429
        assert error(answer) == {
            "message": "the bodies of open requests have more than 4000 bytes: try again later "
            "(the operator can raise --max-body-bytes)",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
        assert answer.headers["retry-after"] == "1"
    for _ in range(100):  # until they are known to have gone
        answer = httpx.post(f"{small.url}/v1/chat/completions", json=CHAT)
        if answer.status_code == 200:
            break
    assert answer.status_code == 200, answer.text


def test_a_refused_body_that_has_ended_is_not_waited_for(
    small: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(middleware, "MAX_BODIES", 0)
    monkeypatch.setattr(middleware, "DISCARD_SECONDS", 60)
    answer = httpx.post(f"{small.url}/v1/chat/completions", json=CHAT, timeout=20)
    assert answer.status_code == 429


@pytest.mark.parametrize(
    "headers", [{"x-large": "y" * 4000}, {f"x-{number}": "y" for number in range(120)}]
)
def test_too_many_headers_are_431(small: FakeServer, headers: dict[str, str]):
    answer = httpx.get(f"{small.url}/health", headers=headers)
    assert answer.status_code == 431
    assert error(answer)["code"] == "headers_too_large"


def fails(*args: object) -> None:
    raise RuntimeError("a seeded fault")


Answers = Callable[[], httpx.Response]


@pytest.fixture
def errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Answers]]:
    """By its status, what is answered before a route or when one fails, to an allowed origin."""
    limits = {"max_body_bytes": 2000, "max_header_bytes": 4000, "allowed_origins": (APP,)}
    states: list[middleware.DrainState] = []

    class KnownState(middleware.DrainState):
        def __init__(self) -> None:
            super().__init__()
            states.append(self)

    monkeypatch.setattr(middleware, "DrainState", KnownState)
    with fake_server(tmp_path, **limits) as fake, monkeypatch.context() as patch:
        url = f"{fake.url}/v1/chat/completions"

        def chat(headers: dict[str, str] | None = None, body: object = CHAT) -> httpx.Response:
            return httpx.post(url, json=body, headers={"origin": APP} | (headers or {}))

        def internal() -> httpx.Response:
            patch.setattr(ServerState, "check_model", fails)
            return chat()

        def full() -> httpx.Response:
            patch.setattr(middleware, "MAX_BODIES", 0)
            return chat()

        def draining() -> httpx.Response:
            [state] = states
            state.draining = state.ended = True
            return chat()

        yield {
            200: chat,
            404: lambda: httpx.get(f"{fake.url}/no/such/route", headers={"origin": APP}),
            413: lambda: chat(body=CHAT | {"user": "x" * 3000}),
            415: lambda: chat({"content-encoding": "br"}),
            429: full,
            431: lambda: chat({"x-large": "y" * 4000}),
            500: internal,
            503: draining,
        }


@pytest.mark.parametrize("status", [200, 404, 413, 415, 429, 431, 500, 503])
def test_an_allowed_page_reads_every_answer_and_its_id(errors: dict[int, Answers], status: int):
    answer = errors[status]()
    assert answer.status_code == status, answer.text
    assert answer.headers["access-control-allow-origin"] == APP
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert "Origin" in answer.headers["vary"]
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])
    assert answer.headers["openai-processing-ms"].isdigit()


def test_an_internal_error_is_reported_in_the_form_of_its_api_with_the_id(
    small: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ServerState, "check_model", fails)
    named = {"x-request-id": "mine"}
    answer = httpx.post(f"{small.url}/v1/chat/completions", json=CHAT, headers=named)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert error(answer)["code"] == "internal_error"
    body = {**CHAT, "max_tokens": 1}
    answer = httpx.post(f"{small.url}/v1/messages", json=body, headers=named)
    assert (answer.status_code, answer.headers["request-id"]) == (500, "mine")
    assert answer.json()["request_id"] == "mine" and answer.json()["error"]["type"] == "api_error"
    answer = httpx.post(f"{small.url}/api/chat", json=CHAT, headers=named)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine")
    assert set(answer.json()) == {"error"}
    counted = httpx.get(f"{small.url}/metrics").text
    assert (
        'wavefill_http_requests_total{code="500",model_name="model",route="/api/chat"} 1' in counted
    )


def test_a_preflight_has_an_id_and_is_counted(tmp_path: Path):
    asks = {"origin": APP, "access-control-request-method": "POST"}
    with fake_server(tmp_path, api_keys=("key",), allowed_origins=(APP,)) as fake:
        answer = httpx.options(f"{fake.url}/v1/chat/completions", headers=asks)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == APP
    assert answer.headers["x-request-id"]


def test_http_answers_are_counted_by_route_pattern(small: FakeServer):
    httpx.get(f"{small.url}/v1/models/fake")
    httpx.get(f"{small.url}/v1/models/other")
    httpx.get(f"{small.url}/made/up")
    text = httpx.get(f"{small.url}/metrics").text
    for code in ("200", "404"):
        series = f'wavefill_http_requests_total{{code="{code}",model_name="model",route='
        assert f'{series}"/v1/models/{{' in text
    assert 'route="none"' in text and "made" not in text
