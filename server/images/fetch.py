"""An image from a URL of a caller: one GET, to an address that has been checked.

The name is resolved once and the connection goes to the address that was checked, with the name in
TLS and in the Host header: a second look-up could give another address.  Neither proxies nor
cookies nor credentials of the environment are used.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote, urljoin, urlsplit

import httptools

from server.images.addresses import AllowedHosts, is_public
from server.images.image_error import ImageError
from server.metrics.image_causes import ImageCause

SECONDS = 5.0  # for all of it, redirects too
MAX_BYTES = 10 << 20
MAX_REDIRECTS = 3
MAX_AT_ONCE = 32  # the others wait
MAX_URL = 8192  # characters
MAX_HEAD = 64 << 10  # bytes of an answer before its body
MAX_ADDRESSES = 3  # of a name, that are tried
READ_BYTES = 64 << 10
PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
UNQUOTED = "%/:?=&;,+!$'()*@~[]"  # in a path and its query

Resolve = Callable[[str, int], Awaitable[list[str]]]


@dataclass(frozen=True)
class Target:
    """The parts of a URL that may be fetched."""

    scheme: str
    host: str  # as DNS has it
    port: int
    path: str

    @classmethod
    def of(cls, url: str, allowed: AllowedHosts) -> Target:
        """Raises ImageError."""
        try:
            parts = urlsplit(url)
            scheme, name, port = parts.scheme.lower(), parts.hostname, parts.port
            host = "" if name is None else _ascii_host(name)
        except ValueError:
            raise ImageError("is no valid URL: correct it", "source") from None
        check_scheme(scheme)
        if not host:
            raise ImageError("is a URL without a host: correct it", "source")
        if parts.username is not None or parts.password is not None:
            error = "has a user name or a password in it: leave them out"
            raise ImageError(error, "not_allowed")
        port = PORTS[scheme] if port is None else port
        if not allowed.allows(host, port):
            raise ImageError(
                f"is of {host[:100]} port {port}, which this server does not fetch images from: "
                "send the image itself as a data URL (the operator can allow hosts by "
                "--image-urls)",
                "not_allowed",
            )
        query = f"?{parts.query}" if parts.query else ""
        return cls(scheme, host, port, quote((parts.path or "/") + query, safe=UNQUOTED))

    def request(self) -> bytes:
        host = f"[{self.host}]" if ":" in self.host else self.host
        if self.port != PORTS[self.scheme]:
            host += f":{self.port}"
        lines = [
            f"GET {self.path} HTTP/1.1",
            f"Host: {host}",
            "User-Agent: wavefill",
            "Accept: image/*",
            "Accept-Encoding: identity",
            "Connection: close",
        ]
        return "\r\n".join([*lines, "", ""]).encode("ascii")


def check_scheme(scheme: str) -> None:
    """Raises ImageError."""
    if not scheme:
        raise ImageError("is no URL: begin it with data:, https: or http:", "source")
    if scheme not in PORTS:
        error = f"has the scheme {scheme[:20]}: use data, https or http"
        raise ImageError(error, "not_allowed")


def _ascii_host(name: str) -> str:
    """A name in lower case and in DNS's form.  Raises ValueError, of which UnicodeError is one."""
    host = name.rstrip(".").lower()
    return host if host.isascii() else host.encode("idna").decode("ascii")


async def resolved(host: str, port: int) -> list[str]:
    """The addresses of a name.  Raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class ImageFetcher:
    """Fetches images from the hosts that the operator allows."""

    def __init__(
        self,
        allowed: AllowedHosts,
        *,
        seconds: float = SECONDS,
        max_bytes: int = MAX_BYTES,
        resolve: Resolve = resolved,
        permitted: Callable[[str], bool] = is_public,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """resolve, permitted, tls: how names become addresses, which of those may be connected
        to, and whose certificates count
        """
        self.allowed = allowed
        self._seconds, self._max_bytes = seconds, max_bytes
        self._resolve, self._permitted = resolve, permitted
        self._tls = tls or _tls_context
        self._places = asyncio.Semaphore(MAX_AT_ONCE)

    async def fetch(self, url: str) -> bytes:
        """The body of the answer.  Raises ImageError."""
        if self.allowed.none:
            check_scheme(url.partition(":")[0].lower() if ":" in url else "")
            raise ImageError(
                "is a URL to fetch, which this server does not do: send the image itself as a data "
                "URL (the operator can allow hosts by --image-urls)",
                "not_allowed",
            )
        if len(url) > MAX_URL:
            error = f"has {len(url)} characters, a URL may have {MAX_URL}: shorten it"
            raise ImageError(error, "source")
        try:
            async with self._places, asyncio.timeout(self._seconds):
                return await self._follow(url)
        except TimeoutError:
            raise ImageError(
                f"was not fetched within {self._seconds:g} s: send the image itself as a data URL",
                "fetch",
            ) from None

    async def _follow(self, url: str) -> bytes:
        for _ in range(MAX_REDIRECTS + 1):
            target = Target.of(url, self.allowed)
            answer = await self._get(target, await self._addresses(target))
            if answer.status not in REDIRECTS:
                return answer.image()
            if not answer.location:
                error = "redirects to nowhere: give the URL of the image itself"
                raise ImageError(error, "fetch")
            try:
                url = urljoin(url, answer.location)
            except ValueError:
                error = "redirects to an invalid URL: give the URL of the image itself"
                raise ImageError(error, "fetch") from None
        raise ImageError(
            f"redirects more than {MAX_REDIRECTS} times: give the URL of the image itself",
            "fetch",
        )

    async def _addresses(self, target: Target) -> list[str]:
        """Those to connect to, all of them checked.  Raises ImageError."""
        try:
            found = await self._resolve(target.host, target.port)
        except (OSError, UnicodeError):
            found = []
        if not found:
            error = f"is of {target.host[:100]}, which has no address: correct it"
            raise ImageError(error, "fetch")
        if not all(map(self._permitted, found)):
            raise ImageError(
                f"is of {target.host[:100]}, which has an address that is not public: send the "
                "image itself as a data URL",
                "not_allowed",
            )
        return found[:MAX_ADDRESSES]

    async def _get(self, target: Target, addresses: list[str]) -> Answer:
        for address in addresses:
            try:
                reader, writer = await self._connect(target, address)
            except ssl.SSLError as error:
                names = ("verify_message", "reason")
                reason = next((str(each) for n in names if (each := getattr(error, n, ""))), "")
                raise ImageError(
                    f"has no valid TLS connection ({reason or error}): correct it", "fetch"
                ) from None
            except OSError:
                continue
            try:
                writer.write(target.request())
                return await self._read(reader)
            except OSError:
                raise ImageError("broke off while it was fetched: try again", "fetch") from None
            finally:
                writer.transport.abort()
        error = f"is of {target.host[:100]}, which takes no connection: correct it"
        raise ImageError(error, "fetch")

    async def _connect(
        self, target: Target, address: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if target.scheme == "http":
            return await asyncio.open_connection(address, target.port)
        return await asyncio.open_connection(
            address, target.port, ssl=self._tls(), server_hostname=target.host
        )

    async def _read(self, reader: asyncio.StreamReader) -> Answer:
        answer = Answer(self._max_bytes)
        while not answer.complete:
            answer.feed(await reader.read(READ_BYTES))
        return answer


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()


class Answer:
    """An HTTP answer, as far as it has been read."""

    def __init__(self, max_bytes: int) -> None:
        self.status = 0
        self.complete = False  # nothing more has to be read
        self._error: str | None = None
        self._cause: ImageCause = "fetch"
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    @property
    def location(self) -> str:
        return self._headers.get("location", "")

    def image(self) -> bytes:
        return bytes(self._body)

    def feed(self, data: bytes) -> None:
        """Take bytes of the connection; none: it has ended.  Raises ImageError."""
        if not data:
            self._end()
        else:
            if not self.status:
                self._head_bytes += len(data)
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserError:
                self._refuse("is answered with something that is not HTTP: correct it")
            if not self.status and self._head_bytes > MAX_HEAD:
                self._refuse(f"is answered with headers of over {MAX_HEAD} bytes: use another host")
        if self._error is not None:
            raise ImageError(self._error, self._cause)

    def _refuse(self, error: str, cause: ImageCause = "fetch") -> None:
        # Not raised: a parser wraps what its callbacks raise.
        if self._error is None:
            self._error, self._cause = error, cause
        self.complete = True

    def _end(self) -> None:
        sized = {"content-length", "transfer-encoding"} & self._headers.keys()
        if not self.status or sized:
            self._refuse("broke off while it was fetched: try again")
        self.complete = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # interim: the answer follows
            self._headers = {}
            return
        self.status = status
        if status in REDIRECTS:
            self.complete = True
        elif status != 200:
            self._refuse(f"is answered with the status {status}: give the URL of an image")
        elif self._headers.get("content-encoding", "identity").lower() != "identity":
            self._refuse("is answered with a compressed body: use another host")
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_bytes:
            self._refuse(self._too_large(), "size")

    def on_body(self, data: bytes) -> None:
        if self.status == 200:
            self._body += data
        if len(self._body) > self._max_bytes:
            self._refuse(self._too_large(), "size")

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True

    def _too_large(self) -> str:
        return f"has over {self._max_bytes} bytes, the limit of a fetched image: make it smaller"
