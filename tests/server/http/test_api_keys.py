"""API keys: which routes need one, and which requests share a prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest

from server.app import create_app
from server.errors import INVALID_REQUEST
from server.state import ServerState
from tests.support.server.fake_engine import FakeServer, fake_config, fake_server
from tests.support.server.malformed_requests import error

PROBES = {"/health", "/livez", "/readyz", "/ready", "/ping"}
KEYLESS = {*PROBES, "/"}  # of the documented routes
PAGES = (
    *("/docs", "/openapi.json", "/static/swagger-ui.css", "/pages/playground/main.js"),
    "/favicon.ico",
)
KEYS = ("first-key", "second-key")
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_server(tmp_path, api_keys=KEYS) as fake:
        yield fake


def test_every_route_but_probes_and_pages_needs_a_key(locked: FakeServer):
    state = ServerState(fake_config(), None, None, None)  # type: ignore[arg-type]
    documented = create_app(state).openapi()["paths"]
    assert len(documented) > 12
    for path, methods in documented.items():
        for method in methods:
            answer = httpx.request(method, locked.url + path)
            if path in KEYLESS:
                assert answer.status_code == 200, path
            else:
                assert answer.status_code == 401, path
                if not path.startswith(("/v1/messages", "/api/")):  # errors of their own form
                    assert error(answer)["code"] is None
    assert httpx.get(f"{locked.url}/no/such/route").status_code == 401
    for path in PAGES:
        assert httpx.get(locked.url + path).status_code == 200, path


def test_the_documentation_says_which_routes_need_a_key_and_how_to_send_it(locked: FakeServer):
    document = httpx.get(f"{locked.url}/openapi.json").json()
    [(name, scheme)] = document["components"]["securitySchemes"].items()
    assert scheme == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{name: []}]
    paths = document["paths"].items()
    public = {path for path, item in paths if item.get("get", {}).get("security") == []}
    assert public == KEYLESS


def test_without_keys_the_documentation_asks_for_none(tmp_path: Path):
    with fake_server(tmp_path) as fake:
        document = httpx.get(f"{fake.url}/openapi.json").json()
    assert "security" not in document and "securitySchemes" not in document["components"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
def test_each_key_is_accepted(locked: FakeServer, key: str, header: str):
    value = f"Bearer {key}" if header == "authorization" else key
    answer = httpx.post(f"{locked.url}/v1/chat/completions", json=CHAT, headers={header: value})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "value", ["", "Bearer", "Bearer wrong", "Basic first-key", "first-key", "Bearer é"]
)
def test_a_wrong_key_is_401(locked: FakeServer, value: str):
    headers = {"authorization": value.encode()}
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("headers", "code", "beginning"),
    [
        ({}, None, "You did not provide an API key: send"),
        ({"authorization": "Bearer"}, None, "You did not provide an API key: send"),
        ({"authorization": "Basic first-key"}, None, "You did not provide an API key: send"),
        ({"authorization": "Bearer wrong"}, "invalid_api_key", "Incorrect API key provided: send"),
        ({"x-api-key": "wrong"}, "invalid_api_key", "Incorrect API key provided: send"),
    ],
)
def test_a_missing_key_is_not_called_incorrect(
    locked: FakeServer, headers: dict[str, str], code: str | None, beginning: str
):
    answer = httpx.get(f"{locked.url}/v1/models", headers=headers)
    found = error(answer)
    assert (answer.status_code, found["code"], found["type"]) == (401, code, INVALID_REQUEST)
    assert found["message"].startswith(beginning)
    assert "`Authorization: Bearer KEY`" in found["message"]
    assert answer.headers["www-authenticate"] == "Bearer"


def salts(fake: FakeServer, requested: list[tuple[str, str | None]]) -> list[bytes]:
    """The salts with which one prompt reaches the engine, for each (API key, cache_salt)."""
    for key, own in requested:
        body = CHAT if own is None else {**CHAT, "cache_salt": own}
        headers = {"authorization": f"Bearer {key}"}
        for path, asks in (
            ("chat/completions", body),
            ("completions", {**body, "messages": None, "prompt": "Hi"}),
        ):
            sent = {name: value for name, value in asks.items() if value is not None}
            answer = httpx.post(f"{fake.url}/v1/{path}", json=sent, headers=headers)
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
def test_all_requests_of_one_key_share_the_prefix_cache(tmp_path: Path, keys: tuple[str, ...]):
    with fake_server(tmp_path, api_keys=keys) as fake:
        first, own, again = salts(fake, [("only", None), ("only", "mine"), ("only", None)])
        assert first == again != own


def test_a_host_header_cannot_move_the_path(locked: FakeServer):
    answer = httpx.get(f"{locked.url}/v1/models", headers={"host": "x/health?"})
    assert answer.status_code in (400, 401)
