"""The bytes of an image from a data URL, a file or a URL."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.batches.files import FileStore
from server.batches.store import BatchStore
from server.errors import NotFound
from server.images import source
from server.images.addresses import AllowedHosts
from server.images.fetch import ImageFetcher
from server.images.image_error import ImageError
from server.images.source import ImageData, ImageSources, parse_data_url
from tests.support.images.image_host import fetcher, http, image_host

BYTES = bytes(range(256))
TEXT = base64.b64encode(BYTES).decode()
OFF = ImageFetcher(AllowedHosts())


@pytest.mark.parametrize(
    ("url", "declared"),
    [
        (f"data:image/png;base64,{TEXT}", "image/png"),
        (f"DATA:Image/PNG;BASE64,{TEXT}", "image/png"),
        (f"data:image/jpeg;charset=x;base64,{TEXT}", "image/jpeg"),
        (f"data:image/*;base64,{TEXT}", ""),
    ],
)
def test_a_data_url_has_a_media_type_and_bytes(url: str, declared: str) -> None:
    assert parse_data_url(url) == ImageData(BYTES, declared)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:", "no valid data URL"),
        ("data:image/png;base64", "no valid data URL"),
        (f"data:{'a' * 200},", "no valid data URL"),
        ("data:image/png,abc", "without ;base64"),
        ("data:,abc", "without ;base64"),
        (f"data:text/html;base64,{TEXT}", "a data URL of text/html"),
        (f"data:application/pdf;base64,{TEXT}", "a data URL of application/pdf"),
        (f"data:;base64,{TEXT}", "of no media type"),
        ("data:image/png;base64,a", "not valid base64"),
        ("data:image/png;base64,a===", "not valid base64"),
        ("data:image/png;base64,YWJj*", "not valid base64"),
        ("data:image/png;base64,YWJj YWJj", "not valid base64"),
        ("data:image/png;base64,-_-_", "not valid base64"),
        ("data:image/png;base64,\u00e9\u00e9\u00e9\u00e9", "not valid base64"),
    ],
)
def test_a_wrong_data_url_is_refused_by_what_is_wrong(url: str, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        parse_data_url(url)


def test_too_many_bytes_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_IMAGE_BYTES", 255)
    with pytest.raises(ImageError, match="has 256 bytes, an image may have 255"):
        parse_data_url(f"data:image/png;base64,{TEXT}"[:-1])


@pytest.fixture
def files(tmp_path: Path) -> Iterator[FileStore]:
    store = BatchStore(tmp_path, max_bytes=1 << 20)
    yield store.files
    store.close()


def stored(files: FileStore, owner: bytes, data: bytes) -> str:
    id = files.begin(owner, len(data))
    files.path(id).write_bytes(data)
    with files.database.transaction() as connection:
        files.finish(
            connection, id, filename="a", purpose="vision", num_bytes=len(data), keep_seconds=None
        )
    return id


async def test_a_file_is_read_for_its_owner_alone(files: FileStore) -> None:
    id = stored(files, b"me", BYTES)
    assert await ImageSources(OFF, files, b"me").read(None, id) == ImageData(BYTES)
    with pytest.raises(NotFound, match="no file"):
        await ImageSources(OFF, files, b"you").read(None, id)
    with pytest.raises(NotFound, match="no file"):
        await ImageSources(OFF, files, b"me").read(None, "../../etc/passwd")


async def test_a_file_that_is_gone_or_too_large_is_refused(
    files: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = stored(files, b"me", BYTES)
    sources = ImageSources(OFF, files, b"me")
    monkeypatch.setattr(source, "MAX_IMAGE_BYTES", 255)
    with pytest.raises(ImageError, match="has 256 bytes, an image may have 255"):
        await sources.read(None, id)
    monkeypatch.undo()
    files.path(id).unlink()
    with pytest.raises(NotFound, match="is gone"):
        await sources.read(None, id)


async def test_without_a_data_directory_the_remedy_is_named() -> None:
    with pytest.raises(ImageError, match="keeps none: send the image itself"):
        await ImageSources(OFF, None, b"").read(None, "file-1")


async def test_a_url_is_fetched_if_that_is_allowed() -> None:
    async with image_host() as host:
        host.answers["/a"] = http(BYTES, "200 OK", "Content-Type: application/octet-stream")
        url = host.url("/a")
        assert await ImageSources(fetcher(host), None, b"").read(url, None) == ImageData(BYTES)
        with pytest.raises(ImageError, match="--image-urls"):
            await ImageSources(OFF, None, b"").read(url, None)
