"""--root-path: a server under the path prefix of a proxy."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx2 as httpx
import pytest

from tests.support.server.fake_engine import FakeServer, fake_server
from tests.support.server.malformed_requests import error

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi"}]}
KEY = {"authorization": "Bearer key"}


@pytest.fixture
def prefixed(tmp_path: Path) -> Iterator[FakeServer]:
    with fake_server(tmp_path, root_path="/team/llm", api_keys=("key",)) as fake:
        yield fake


@pytest.mark.parametrize("prefix", ["", "/team/llm"])
def test_paths_are_answered_with_the_prefix_and_without(prefixed: FakeServer, prefix: str):
    base = prefixed.url + prefix
    assert httpx.get(f"{base}/readyz").status_code == 200
    assert httpx.get(f"{base}/v1/models").status_code == 401
    answer = httpx.post(f"{base}/v1/chat/completions", json=CHAT, headers=KEY)
    assert answer.status_code == 200
    assert httpx.get(base or prefixed.url, headers=KEY).text.startswith("Wavefill is running")
    refused = httpx.post(f"{base}/v1/messages", json={}, headers=KEY)
    assert refused.json()["type"] == "error", "errors have the form of the API of the path"


def test_what_only_begins_like_the_prefix_is_another_path(prefixed: FakeServer):
    for path in ("/team/llms/readyz", "/team", "/team/llm/team/llm/readyz"):
        answer = httpx.get(prefixed.url + path, headers=KEY)
        assert answer.status_code == 404 and error(answer)["code"] == "not_found", path


def test_the_documentation_works_under_the_prefix(prefixed: FakeServer):
    page = f"{prefixed.url}/team/llm/docs"
    text = httpx.get(page).text
    urls = re.findall(r"(?:href|src)=\"([^\"]+)\"|url: '([^']+)'", text)
    linked = [url for pair in urls for url in pair if url and not url.startswith("data:")]
    assert len(linked) == 3
    for url in linked:
        absolute = urljoin(page, url)
        assert absolute.startswith(f"{prefixed.url}/team/llm/")
        assert httpx.get(absolute).status_code == 200, url
    document = httpx.get(f"{prefixed.url}/team/llm/openapi.json").json()
    assert document["servers"] == [{"url": "/team/llm"}]


def test_the_playground_works_under_the_prefix(prefixed: FakeServer):
    html = {"accept": "text/html"}
    bare = httpx.get(f"{prefixed.url}/team/llm", headers=html)
    assert (bare.status_code, bare.headers["location"]) == (307, "/team/llm/")
    for page in (f"{prefixed.url}/team/llm/", f"{prefixed.url}/"):
        answer = httpx.get(page, headers=html)
        urls: list[str] = re.findall(r"(?:href|src)=\"(pages/[^\"]+)\"", answer.text)
        assert len(urls) > 5
        for url in urls:
            assert httpx.get(urljoin(page, url)).status_code == 200, url
