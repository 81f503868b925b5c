"""Which Host and Origin headers are accepted: DNS rebinding and cross-site requests."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import FakeServer, fake_server
from tests.support.server.malformed_requests import error

KEYS = ("first-key", "second-key")
APP, EVIL = "https://app.example", "https://evil.example"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}


def test_cors_headers_are_sent_to_allowed_origins_only(tmp_path: Path):
    with fake_server(tmp_path, allowed_origins=(APP,)) as fake:
        for origin, allowed in ((APP, True), (EVIL, False)):
            answer = httpx.get(f"{fake.url}/v1/models", headers={"origin": origin})
            assert ("access-control-allow-origin" in answer.headers) == allowed


def test_pages_of_allowed_origins_may_call_from_outside_a_private_network(tmp_path: Path):
    asks = {
        "access-control-request-method": "POST",
        "access-control-request-private-network": "true",
    }
    with fake_server(tmp_path, allowed_origins=(APP,)) as fake:
        for origin, status in ((APP, 200), (EVIL, 400)):
            headers = asks | {"origin": origin}
            answer = httpx.options(f"{fake.url}/v1/chat/completions", headers=headers)
            assert answer.status_code == status
            assert ("access-control-allow-origin" in answer.headers) == (status == 200)
            if status == 200:
                assert answer.headers["access-control-allow-private-network"] == "true"


def test_without_allowed_origins_no_cors_headers_are_sent(http: httpx.Client):
    answer = http.get("/v1/models", headers={"origin": APP})
    assert "access-control-allow-origin" not in answer.headers


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
    for words in ("header Host is `evil.example:8000`", "localhost, 127.0.0.1, ::1 only"):
        assert words in answer.text
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
def test_the_configuration_decides_which_hosts_are_answered(
    tmp_path: Path,
    config: dict[str, object],
    answered: str,
    refused: str,
):
    key = {"x-api-key": KEYS[0]}
    with fake_server(tmp_path, **config) as fake:
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
def test_own_pages_and_installed_applications_are_accepted(
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
def test_the_configuration_decides_which_origins_are_accepted(
    tmp_path: Path,
    config: dict[str, object],
    origin: str,
    status: int,
):
    with fake_server(tmp_path, **config) as fake:
        headers = {"origin": origin, "x-api-key": KEYS[0]}
        if origin == "http://llm.example":
            headers["host"] = "llm.example"
        answer = httpx.post(f"{fake.url}/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == status, answer.text
