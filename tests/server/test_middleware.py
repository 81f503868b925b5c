"""What stands before every route: keys, limits, the request id, the drain."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import fake_engine
import httpx2 as httpx
import pytest
from fake_engine import FakeServer, fake_server
from msgspec.structs import replace

from server import middleware
from server.app import create_app
from server.state import ServerState

PROBES = {"/health", "/livez", "/readyz", "/ready", "/ping"}
KEYS = ("first-key", "second-key")
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


@contextmanager
def serving(folder: Path, patch: pytest.MonkeyPatch, **changes: object) -> Iterator[FakeServer]:
    """A fake server with a changed configuration."""
    plain = fake_engine.fake_config

    def changed(folder: Path):
        return replace(plain(folder), **changes)

    with patch.context() as patched:
        patched.setattr(fake_engine, "fake_config", changed)
        with fake_server(folder) as fake:
            yield fake


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    with serving(tmp_path, monkeypatch, api_keys=KEYS) as fake:
        yield fake


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    limits = {"max_body_bytes": 2000, "max_header_bytes": 4000}
    with serving(tmp_path, monkeypatch, **limits) as fake:
        yield fake


def error(answer: httpx.Response) -> dict[str, object]:
    body = answer.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body


def test_every_route_but_the_probes_needs_a_key(locked: FakeServer):
    state = ServerState(fake_engine.fake_config(Path()), None, None, None)  # type: ignore[arg-type]
    documented = create_app(state).openapi()["paths"]
    assert len(documented) > 12
    hidden = {"/docs": ["get"], "/openapi.json": ["get"], "/static/swagger-ui.css": ["get"]}
    for path, methods in {**documented, **hidden}.items():
        for method in methods:
            answer = httpx.request(method, locked.url + path)
            if path in PROBES:
                assert answer.status_code == 200, path
            else:
                assert answer.status_code == 401, path
                if not path.startswith(("/v1/messages", "/api/")):  # errors of their own form
                    assert error(answer)["code"] == "invalid_api_key"
    assert httpx.get(f"{locked.url}/no/such/route").status_code == 401


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_each_key_opens_every_route(locked: FakeServer, key: str, header: str):
    value = f"Bearer {key}" if header == "authorization" else key
    answer = httpx.post(f"{locked.url}/v1/chat/completions", json=CHAT, headers={header: value})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer é"]
)
def test_a_wrong_key_opens_nothing(locked: FakeServer, value: str):
    headers = {"authorization": value.encode()}
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 401


def salts(fake: FakeServer, asked: list[tuple[str, str | None]]) -> list[bytes]:
    """The salts with which one prompt reaches the engine, for each (API key, cache_salt)."""
    for key, own in asked:
        body = CHAT if own is None else {**CHAT, "cache_salt": own}
        headers = {"authorization": f"Bearer {key}"}
        for path, asks in (
            ("chat/completions", body),
            ("completions", {**body, "messages": None, "prompt": "Hi"}),
        ):
            given = {name: value for name, value in asks.items() if value is not None}
            answer = httpx.post(f"{fake.url}/v1/{path}", json=given, headers=headers)
            assert answer.status_code == 200, answer.text
    found = [request.salt for request in fake.engine.requests]
    assert found[::2] == found[1::2], "chat and completions differ"
    return found[::2]


def test_several_keys_share_no_prefix_cache(locked: FakeServer):
    first, second = KEYS
    found = salts(locked, [(first, None), (second, None), (first, "mine"), (second, "mine")])
    assert len(set(found)) == 4 and all(found)
    assert salts(locked, [(first, None), (first, "mine")])[-2:] == [found[0], found[2]]


@pytest.mark.parametrize("keys", [(), ("only",), ("only", "only")])
def test_all_requests_of_one_key_share_the_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...]
):
    with serving(tmp_path, monkeypatch, api_keys=keys) as fake:
        first, own, again = salts(fake, [("only", None), ("only", "mine"), ("only", None)])
        assert first == again != own


def test_a_host_header_cannot_move_the_path(locked: FakeServer):
    answer = httpx.get(f"{locked.url}/v1/models", headers={"host": "x/health?"})
    assert answer.status_code in (400, 401)


def test_a_request_id_is_given_back_or_made(small: FakeServer):
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
    monkeypatch.setattr(middleware, "MOST_BODIES", 2)
    address = small.url.removeprefix("http://").split(":")
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"content-length: 2000\r\n\r\n"
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
            "message": "the bodies of open requests have more than 4000 bytes: try again later",
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


@pytest.mark.parametrize(
    "headers", [{"x-large": "y" * 4000}, {f"x-{number}": "y" for number in range(120)}]
)
def test_too_many_headers_are_431(small: FakeServer, headers: dict[str, str]):
    answer = httpx.get(f"{small.url}/health", headers=headers)
    assert answer.status_code == 431
    assert error(answer)["code"] == "headers_too_large"


def test_a_browser_is_let_in_only_from_an_allowed_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with serving(tmp_path, monkeypatch, allowed_origins=("https://app.example",)) as fake:
        for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
            answer = httpx.get(f"{fake.url}/v1/models", headers={"origin": origin})
            assert ("access-control-allow-origin" in answer.headers) == allowed


def test_without_allowed_origins_no_browser_is_let_in(small: FakeServer):
    answer = httpx.get(f"{small.url}/v1/models", headers={"origin": "https://app.example"})
    assert "access-control-allow-origin" not in answer.headers


def test_http_answers_are_counted_by_route_pattern(small: FakeServer):
    httpx.get(f"{small.url}/v1/models/fake")
    httpx.get(f"{small.url}/v1/models/other")
    httpx.get(f"{small.url}/made/up")
    text = httpx.get(f"{small.url}/metrics").text
    for code in ("200", "404"):
        series = f'wavefill_http_requests_total{{code="{code}",model_name="model",route='
        assert f'{series}"/v1/models/{{' in text
    assert 'route="none"' in text and "made" not in text
