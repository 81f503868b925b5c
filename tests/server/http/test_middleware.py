"""What stands before every route: keys, limits, the request id, the drain."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from msgspec.structs import replace

from server.app import create_app
from server.errors import INVALID_REQUEST
from server.http import middleware
from server.state import ServerState
from tests.support.server import fake_engine
from tests.support.server.fake_engine import FakeServer, fake_server

PROBES = {"/health", "/livez", "/readyz", "/ready", "/ping"}
KEYS = ("first-key", "second-key")
APP = "https://app.example"
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
                    assert error(answer)["code"] is None
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


@pytest.mark.parametrize(
    ("headers", "code", "told"),
    [
        ({}, None, "You did not provide an API key: send"),
        ({"authorization": "Bearer"}, None, "You did not provide an API key: send"),
        ({"authorization": "Basic first-key"}, None, "You did not provide an API key: send"),
        ({"authorization": "Bearer wrong"}, "invalid_api_key", "Incorrect API key provided: send"),
        ({"x-api-key": "wrong"}, "invalid_api_key", "Incorrect API key provided: send"),
    ],
)
def test_a_missing_key_is_not_called_incorrect(
    locked: FakeServer, headers: dict[str, str], code: str | None, told: str
):
    answer = httpx.get(f"{locked.url}/v1/models", headers=headers)
    found = error(answer)
    assert (answer.status_code, found["code"], found["type"]) == (401, code, INVALID_REQUEST)
    assert str(found["message"]).startswith(told)
    assert "`Authorization: Bearer KEY`" in str(found["message"])
    assert answer.headers["www-authenticate"] == "Bearer"


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


EVIL = "https://evil.example"


def bare(url: str, request: str) -> bytes:
    """The answer to a request that is sent as it is written."""
    address = url.removeprefix("http://")
    with socket.create_connection((address.split(":")[0], int(address.split(":")[1]))) as sending:
        sending.sendall(request.replace("HERE", address).encode())
        return b"".join(iter(lambda: sending.recv(65536), b""))


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/files"),
        ("POST", "/v1/messages"),
        ("GET", "/api/tags"),
        ("POST", "/api/chat"),
        ("GET", "/no/such/route"),
    ],
)
def test_a_loopback_server_answers_to_its_own_names_only(
    http: httpx.Client, method: str, path: str
):
    answer = http.request(method, path, headers={"host": "evil.example:8000"})
    assert answer.status_code == 403
    for told in ("header Host is `evil.example:8000`", "localhost, 127.0.0.1, ::1 only"):
        assert told in answer.text
    assert "--allowed-hosts evil.example" in answer.text
    if not path.startswith(("/v1/messages", "/api/")):
        assert error(answer)["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8000", 200),
        ("LocalHost.:8000", 200),
        ("127.0.0.1", 200),
        ("127.0.0.1:1", 200),
        ("[::1]", 200),
        ("[::1]:8000", 200),
        ("", 200),
        ("10.0.0.1", 403),
        ("localhost.evil.example", 403),
        ("localhost:80@evil.example", 403),
        ("localhost:port", 403),
        ("evil.example, localhost", 403),
        ("[::2]:8000", 403),
    ],
)
def test_the_name_of_a_host_is_compared_as_a_whole(http: httpx.Client, host: str, status: int):
    assert http.get("/v1/models", headers={"host": host}).status_code == status


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_no_host_is_accepted_and_of_two_both_must_be(shared: FakeServer, version: str):
    head = f"GET /v1/models HTTP/{version}\r\nconnection: close\r\n"
    assert b" 200 " in bare(shared.url, f"{head}\r\n")[:20]
    assert b" 200 " in bare(shared.url, f"{head}host: HERE\r\n\r\n")[:20]
    assert b" 403 " in bare(shared.url, f"{head}host: HERE\r\nhost: evil.example\r\n\r\n")[:20]
    assert b" 403 " in bare(shared.url, f"{head}host: evil.example\r\nhost: HERE\r\n\r\n")[:20]


@pytest.mark.parametrize(
    ("config", "answered", "refused"),
    [
        ({"allowed_hosts": ("llm.example",)}, "llm.example:80 localhost", "evil.example"),
        ({"allowed_hosts": ("llm.example:80",)}, "llm.example:80", "llm.example:81"),
        ({"allowed_hosts": ("*",)}, "evil.example", ""),
        ({"host": "127.0.0.2"}, "127.0.0.2:8000 localhost", "127.0.0.3"),
        ({"host": "0.0.0.0"}, "evil.example 10.0.0.1:8000", ""),
        ({"host": "::", "allowed_hosts": ("::2",)}, "[::2]:8000 127.0.0.1", "[::3]"),
        ({"api_keys": KEYS}, "localhost", "evil.example"),
    ],
)
def test_which_hosts_are_answered_is_the_operators_choice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, object],
    answered: str,
    refused: str,
):
    key = {"x-api-key": KEYS[0]}
    with serving(tmp_path, monkeypatch, **config) as fake:
        for status, hosts in ((200, answered), (403, refused)):
            for host in hosts.split():
                answer = httpx.get(f"{fake.url}/v1/models", headers={"host": host, **key})
                assert answer.status_code == status, (host, answer.text)


@pytest.mark.parametrize(
    "origin", [EVIL, "http://evil.example:8000", "null", "file://", "http://127.0.0.1:1", "x", ""]
)
def test_a_foreign_page_changes_nothing_without_a_key(http: httpx.Client, origin: str):
    headers = {"origin": origin}
    form = {"files": {"file": ("x.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    for answer in (
        http.post("/v1/files", headers=headers, **form),
        http.post("/v1/chat/completions", headers=headers, json=CHAT),
        http.delete("/v1/chat/completions/x", headers=headers),
        http.post("/v1/responses/x/cancel", headers=headers),
    ):
        assert (answer.status_code, error(answer)["code"]) == (403, "origin_not_allowed")
        assert f"the header Origin is `{origin}`" in answer.text
        assert f"--allowed-origins {origin}" in answer.text
    for route in ("generate", "chat", "show"):
        answer = http.post(f"/api/{route}", headers=headers, json=CHAT)
        assert answer.status_code == 403 and "Origin" in answer.json()["error"]


def test_a_foreign_page_gets_no_permission_to_read(http: httpx.Client):
    answer = http.get("/v1/models", headers={"origin": EVIL})
    assert answer.status_code == 200  # which its browser does not show it
    assert not any(name.startswith("access-control") for name in answer.headers)
    asks = {"origin": EVIL, "access-control-request-method": "POST"}
    answer = http.options("/v1/chat/completions", headers=asks)
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("localhost:8000", "http://localhost:8000", 200),
        ("127.0.0.1:8000", "http://localhost:8000", 200),
        ("[::1]:8000", "http://[::1]:8000", 200),
        ("localhost", "http://localhost", 200),
        ("localhost:443", "https://localhost", 200),
        ("localhost", "http://localhost:3000", 403),
        ("localhost:8000", "http://localhost", 403),
        ("localhost:8000", "app://obsidian.md", 200),
        ("localhost:8000", "chrome-extension://abcdef", 200),
    ],
)
def test_own_pages_and_installed_applications_are_let_in(
    http: httpx.Client, host: str, origin: str, status: int
):
    for path in ("/v1/chat/completions", "/api/chat"):
        headers = {"host": host, "origin": origin}
        assert http.post(path, json=CHAT, headers=headers).status_code == status, path


@pytest.mark.parametrize(
    ("config", "origin", "status"),
    [
        ({"allowed_origins": (EVIL,)}, EVIL, 200),
        ({"allowed_origins": (APP,)}, EVIL, 403),
        ({"allowed_origins": ("null",)}, "null", 200),
        ({"allowed_origins": ("*",)}, "null", 200),
        ({"api_keys": KEYS}, EVIL, 200),
        ({"host": "0.0.0.0"}, EVIL, 403),
        ({"host": "0.0.0.0"}, "http://llm.example", 200),
        ({"allowed_hosts": ("llm.example",)}, "http://llm.example", 200),
    ],
)
def test_which_pages_may_ask_is_the_operators_choice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, object],
    origin: str,
    status: int,
):
    with serving(tmp_path, monkeypatch, **config) as fake:
        headers = {"origin": origin, "x-api-key": KEYS[0]}
        if origin == "http://llm.example":
            headers["host"] = "llm.example"
        answer = httpx.post(f"{fake.url}/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == status, answer.text


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
    with serving(tmp_path, monkeypatch, **limits) as fake, monkeypatch.context() as patch:
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
            state.draining = True
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


def test_an_unforeseen_failure_is_told_in_the_callers_words_with_the_id(
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


def test_a_preflight_has_an_id_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asks = {"origin": APP, "access-control-request-method": "POST"}
    with serving(tmp_path, monkeypatch, api_keys=KEYS, allowed_origins=(APP,)) as fake:
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
