"""Images from URLs: what is fetched, and what a caller cannot make the server reach."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from typing import Any

import pytest

from server.images.addresses import AllowedHosts
from server.images.fetch import ImageFetcher
from server.images.image_error import ImageError
from tests.support.images.image_host import ImageHost, fetcher, http, image_host, redirect

PICTURE = bytes(range(256)) * 40


@pytest.fixture
async def host() -> AsyncIterator[ImageHost]:
    async with image_host() as host:
        host.answers["/a.png"] = http(PICTURE)
        yield host


async def refusal(fetch: ImageFetcher, url: str) -> str:
    with pytest.raises(ImageError) as caught:
        await fetch.fetch(url)
    return str(caught.value)


async def test_a_picture_is_fetched_by_one_plain_request(host: ImageHost) -> None:
    assert await fetcher(host).fetch(host.url("/a.png")) == PICTURE
    [request] = host.requests
    lines = request.decode().lower().split("\r\n")
    assert lines[0] == "get /a.png http/1.1"
    assert f"host: pictures.test:{host.port}" in lines
    assert not [line for line in lines if line.startswith(("cookie", "authorization", "referer"))]


async def test_no_proxy_of_the_environment_is_used(
    host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert await fetcher(host).fetch(host.url("/a.png")) == PICTURE


async def test_a_body_in_chunks_and_one_that_ends_with_the_connection_are_whole(
    host: ImageHost,
) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    host.answers["/chunks"] = head + b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n"
    host.answers["/end"] = b"HTTP/1.0 200 OK\r\n\r\n" + PICTURE
    host.answers["/early"] = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + http(PICTURE)
    fetch = fetcher(host)
    assert await fetch.fetch(host.url("/chunks")) == b"abcdefg"
    assert await fetch.fetch(host.url("/end")) == PICTURE
    assert await fetch.fetch(host.url("/early")) == PICTURE


async def test_a_path_of_any_characters_stays_one_path(host: ImageHost) -> None:
    host.answers["/%C3%A9%20a.png?b=%22"] = http(PICTURE)
    assert await fetcher(host).fetch(host.url('/é a.png?b="#part')) == PICTURE
    await refusal(fetcher(host), host.url("/x\r\nHost: evil.test\r\n\r\nGET /y"))
    assert all(b"evil" not in request.split(b"\r\n", 1)[1] for request in host.requests)


async def test_without_allowed_hosts_no_connection_is_made(host: ImageHost) -> None:
    fetch = ImageFetcher(AllowedHosts.parse(""))
    assert "--image-urls" in await refusal(fetch, host.url("/a.png"))
    assert host.requests == []


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///etc/passwd", "the scheme file: use data, https or http"),
        ("FILE:///etc/passwd", "the scheme file"),
        ("ftp://pictures.test/a", "the scheme ftp"),
        ("gopher://pictures.test/a", "the scheme gopher"),
        ("javascript:alert(1)", "the scheme javascript"),
        ("//pictures.test/a.png", "no URL"),
        ("/etc/passwd", "no URL"),
        ("", "no URL"),
        ("http://", "without a host"),
        ("http:///a.png", "without a host"),
        ("http://[::1/a", "no valid URL"),
        ("http://pictures.test:99999/a", "no valid URL"),
        ("http://pictures.test:x/a", "no valid URL"),
        ("http://user@pictures.test/a", "a user name or a password"),
        ("http://user:word@pictures.test/a", "a user name or a password"),
        ("http://other.test/a.png", "other.test port 80, which this server does not fetch"),
        ("http://pictures.test.other.test/a.png", "does not fetch images from"),
        ("http://pictures.test:22/a.png", "pictures.test port 22, which this server does not"),
        ("http://pictures.test\\@other.test/a.png", "user name or a password|does not fetch"),
        ("http://pictures.test/" + "a" * 9000, "a URL may have 8192"),
    ],
)
async def test_a_url_that_is_not_allowed_is_refused_by_what_is_wrong(url: str, words: str) -> None:
    host = ImageHost()
    fetch = fetcher(host, "pictures.test")
    error = await refusal(fetch, url)
    assert any(each in error for each in words.split("|")), error


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1/a", "http://localhost/a", "http://2130706433/a", "http://0x7f.1/a",
        "http://127.1/a", "http://0177.0.0.1/a", "http://0/a", "http://[::1]/a", "http://[::]/a",
        "http://[::ffff:127.0.0.1]/a", "http://[64:ff9b::7f00:1]/a", "http://169.254.169.254/a",
        "http://10.0.0.1/a", "https://192.168.0.1/a", "http://100.64.0.1/a", "http://224.0.0.1/a",
        "http://127.0.0.1./a", "http://[fe80::1%25lo]/a",
    ],
)  # fmt: skip
async def test_no_form_of_an_address_leads_to_a_host_that_is_not_public(url: str) -> None:
    error = await refusal(ImageFetcher(AllowedHosts.parse("any")), url)
    assert "an address that is not public" in error or "has no address" in error


async def test_a_name_with_one_private_address_is_refused(host: ImageHost) -> None:
    async def two(name: str, port: int) -> list[str]:
        return ["93.184.216.34", "127.0.0.1"]

    fetch = ImageFetcher(AllowedHosts.parse("any"), resolve=two)
    error = await refusal(fetch, "http://pictures.test/a.png")
    assert "an address that is not public" in error and "127.0.0.1" not in error


async def test_a_name_is_resolved_once_and_that_address_is_connected_to(host: ImageHost) -> None:
    asked: list[str] = []

    async def changing(name: str, port: int) -> list[str]:
        asked.append(name)
        return ["127.0.0.1"] if len(asked) == 1 else ["127.0.0.2"]

    checked: list[str] = []
    fetch = fetcher(host, resolve=changing, permitted=lambda a: not checked.append(a))
    assert await fetch.fetch(host.url("/a.png")) == PICTURE
    assert asked == ["pictures.test"] and checked == ["127.0.0.1"]


async def test_redirects_are_followed_three_times_and_each_is_checked(host: ImageHost) -> None:
    for step in range(1, 6):
        host.answers[f"/{step}"] = redirect(f"/{step - 1}")
    host.answers["/0"] = http(PICTURE)
    fetch = fetcher(host)
    assert await fetch.fetch(host.url("/3")) == PICTURE
    assert "redirects more than 3 times" in await refusal(fetch, host.url("/4"))
    host.answers["/out"] = redirect("http://other.test/a")
    assert "other.test port 80" in await refusal(fetch, host.url("/out"))
    host.answers["/file"] = redirect("file:///etc/passwd")
    assert "the scheme file" in await refusal(fetch, host.url("/file"))
    host.answers["/user"] = redirect(host.url("/0").replace("//", "//a:b@"))
    assert "a user name" in await refusal(fetch, host.url("/user"))
    host.answers["/nowhere"] = http(b"", "301 Moved Permanently")
    assert "redirects to nowhere" in await refusal(fetch, host.url("/nowhere"))


async def test_a_redirect_to_a_private_address_is_refused(host: ImageHost) -> None:
    async def by_name(name: str, port: int) -> list[str]:
        return ["10.0.0.5" if name == "inside.test" else "127.0.0.1"]

    host.answers["/in"] = redirect(host.url("/a.png", "inside.test"))
    names = [f"{name}:{host.port}" for name in ("pictures.test", "inside.test")]
    fetch = fetcher(host, *names, resolve=by_name, permitted=lambda a: a != "10.0.0.5")
    assert "inside.test, which has an address that is not public" in await refusal(
        fetch, host.url("/in")
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(b"", "404 Not Found"), "the status 404"),
        (http(b"", "500 Internal Server Error"), "the status 500"),
        (http(b"", "206 Partial Content"), "the status 206"),
        (http(PICTURE, "200 OK", "Content-Encoding: gzip"), "a compressed body"),
        (http(bytes(20_000)), "over 16384 bytes"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + bytes(20_000), "over 16384 bytes"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nab", "broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "broke off"),
        (b"", "broke off"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nA: " + b"b" * (1 << 18) + b"\r\n\r\n", "headers of over|not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
async def test_an_answer_that_is_no_picture_is_refused(
    host: ImageHost, answer: bytes, words: str
) -> None:
    host.answers["/a"] = answer
    error = await refusal(fetcher(host, max_bytes=16_384), host.url("/a"))
    assert any(each in error for each in words.split("|")), error


async def test_a_host_that_drips_is_left_after_the_time_limit(host: ImageHost) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.02)

    host.answers["/drip"] = drip
    error = await refusal(fetcher(host, seconds=0.3), host.url("/drip"))
    assert "not fetched within 0.3 s" in error


async def test_a_resolver_that_hangs_is_left_after_the_time_limit(host: ImageHost) -> None:
    async def never(name: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    assert "not fetched within" in await refusal(
        fetcher(host, resolve=never, seconds=0.1), host.url("/a.png")
    )


async def test_tls_is_for_the_name_and_not_for_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    async def connect(address: str, port: int, **options: Any) -> Any:
        asked.update(options, address=address, port=port)
        raise ssl.SSLError(1, "wrong certificate")

    async def there(name: str, port: int) -> list[str]:
        return ["93.184.216.34"]

    monkeypatch.setattr(asyncio, "open_connection", connect)
    fetch = ImageFetcher(AllowedHosts.parse("any"), resolve=there)
    assert "no valid TLS connection" in await refusal(fetch, "https://Exämple.test/a.png")
    assert asked["address"] == "93.184.216.34" and asked["port"] == 443
    assert asked["server_hostname"] == "xn--exmple-cua.test"
    context = asked["ssl"]
    assert context.check_hostname and context.verify_mode == ssl.CERT_REQUIRED


async def test_a_host_without_a_listener_is_refused() -> None:
    async with image_host() as host:
        port = host.port
    fetch = fetcher(ImageHost(port), seconds=2)
    assert "takes no connection" in await refusal(fetch, f"http://pictures.test:{port}/a.png")
