"""Images that a server fetches for its callers, from hosts that its operator allows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.images.image_host import ImageHost, fetcher, http, image_host
from tests.support.images.pictures import encoded, noise
from tests.support.images.vision_server import (
    CHAT,
    MESSAGES,
    RESPONSES,
    chat,
    chat_part,
    message_of,
    vision_server,
)
from tests.support.server.fake_engine import FakeServer

WHOLE = encoded(noise(64, 48))


@pytest.fixture
async def host() -> AsyncIterator[ImageHost]:
    async with image_host() as host:
        host.answers["/a.png"] = http(WHOLE, "200 OK", "Content-Type: text/plain")
        yield host


@pytest.fixture
async def asked(
    host: ImageHost, tmp_path: Path
) -> AsyncIterator[tuple[FakeServer, httpx.AsyncClient]]:
    with vision_server(tmp_path, fetcher=fetcher(host), context=128) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            yield server, client


async def test_a_url_is_fetched_and_decoded(
    host: ImageHost, asked: tuple[FakeServer, httpx.AsyncClient]
) -> None:
    fake, client = asked
    url = host.url("/a.png")
    bodies = {
        CHAT: chat(chat_part(url)),
        RESPONSES: {
            "model": "fake",
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
        },
        MESSAGES: {
            "model": "fake",
            "max_tokens": 8,
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image", "source": {"type": "url", "url": url}}],
                }
            ],
        },
    }
    for route, body in bodies.items():
        answer = await client.post(route, json=body)
        assert answer.status_code == 200, answer.text
    assert len({request.images[0].digest for request in fake.engine.requests}) == 1
    assert len(fake.engine.requests) == len(host.requests) == 3


async def test_what_is_fetched_is_refused_by_its_field(
    host: ImageHost, asked: tuple[FakeServer, httpx.AsyncClient]
) -> None:
    fake, client = asked
    host.answers["/page"] = http(b"<html></html>")
    for path, words in (("/page", "an HTML page"), ("/gone", "the status 404")):
        answer = await client.post(CHAT, json=chat(chat_part(host.url(path))))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[0].content[0].image_url.url"
        assert words in message_of(answer)
    other = chat(chat_part(host.url("/a.png", "other.test")))
    assert "does not fetch images from" in message_of(await client.post(CHAT, json=other))
    assert fake.engine.requests == []


async def test_a_request_fetches_an_image_once_however_often_it_is_counted(
    host: ImageHost, asked: tuple[FakeServer, httpx.AsyncClient]
) -> None:
    fake, client = asked
    image = {"type": "input_image", "image_url": host.url("/a.png")}
    turns = [{"role": "user", "content": f"{'word ' * 12}{number}"} for number in range(9)]
    last = {"role": "user", "content": [image, image]}
    body = {"model": "fake", "input": [*turns, last], "truncation": "auto"}
    answer = await client.post(RESPONSES, json=body)
    assert answer.status_code == 200, answer.text
    [request] = fake.engine.requests
    assert len(request.images) == 2 and len(request.tokens) < 128
    assert len(host.requests) <= 2
