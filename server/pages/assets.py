"""The static files of the pages: found once, read once, sent compressed to who takes that."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from server.errors import NotFound

FOLDER = Path(__file__).parent
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
PACKED = frozenset({".woff2"})  # formats that gzip makes no smaller
HEADERS = {
    # Asked for again at every load, and answered with 304: an upgrade never mixes two versions.
    "cache-control": "no-cache",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True)
class Asset:
    body: bytes
    compressed: bytes | None
    etag: str
    media_type: str


@cache
def names() -> frozenset[str]:
    """Paths below this folder; only these are served, so that a path cannot lead elsewhere."""
    files = [path for path in FOLDER.rglob("*") if path.suffix in MEDIA_TYPES]
    return frozenset(path.relative_to(FOLDER).as_posix() for path in files)


@cache
def asset(name: str) -> Asset:
    """Raises NotFound for a name that is none of `names()`."""
    if name not in names():
        raise NotFound("there is no such file: the page is at /", code="not_found")
    path = FOLDER / name
    body = path.read_bytes()
    compressed = None if path.suffix in PACKED else gzip.compress(body, mtime=0)
    etag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
    return Asset(body, compressed, etag, MEDIA_TYPES[path.suffix])


async def send_asset(request: Request, name: str, headers: dict[str, str]) -> Response:
    """The file, or 304 to who has it.  Raises NotFound."""
    found = await asyncio.to_thread(asset, name)
    fields = HEADERS | headers | {"etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=fields)
    body = found.body
    if found.compressed is not None and "gzip" in request.headers.get("accept-encoding", ""):
        body = found.compressed
        fields["content-encoding"] = "gzip"
    return Response(body, headers=fields, media_type=found.media_type)
