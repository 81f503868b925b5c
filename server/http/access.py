"""Which requests are let through to the routes: API keys, and the headers Host and Origin.

No page in a browser chooses its Host and Origin.  A page whose name is made to resolve to this
machine (DNS rebinding) has that name in Host.  A page of another origin that posts a form here has
that origin in Origin.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import ServerConfig
from server.errors import INVALID_REQUEST, RATE_LIMIT, SERVER_ERROR, error_body
from server.http.paths import needs_no_key
from server.http.request_context import KEY_NAME, OWNER, note_error

Headers = list[tuple[bytes, bytes]]
CLOSE: Headers = [(b"connection", b"close")]
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing
DEFAULT_PORTS = {"http": "80", "https": "443"}
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")
# Other schemes belong to applications and browser extensions that were installed on purpose.
PAGE_SCHEMES = frozenset({"http", "https", "file"})
MAX_SHOWN = 100  # characters of a header in a message


async def refuse(send: Send, status: int, message: str, code: str | None, headers: Headers) -> None:
    """Answer with OpenAI's error body instead of a route's answer."""
    kind = SERVER_ERROR if status >= 500 else INVALID_REQUEST
    if status == 429:
        kind = RATE_LIMIT
    note_error(code or kind)
    await send_error(send, status, error_body(message, kind, None, code), headers)


async def send_error(send: Send, status: int, body: bytes, headers: Headers) -> None:
    """Answer with this body, which is JSON."""
    fields: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *headers,
    ]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


class ApiKeys:
    """The keys of the server, which change when their file is read again.

    A key may have a name before it, which the log says: `NAME KEY`.
    """

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._names: dict[bytes, str] = {}
        self.replace(keys)

    def names(self) -> list[str]:
        """What the log and --dashboard-keys call them."""
        return list(self._names.values())

    def replace(self, keys: tuple[str, ...]) -> None:
        self._names = dict(map(_named_digest, keys))

    def name_of(self, digest: bytes) -> str | None:
        """The name of the key with this SHA-256; None if there is no such key."""
        # All keys are compared, so that the time depends on none of them.
        known = any([hmac.compare_digest(digest, key) for key in self._names])
        return self._names[digest] if known else None


def _named_digest(entry: str) -> tuple[bytes, str]:
    """SHA-256 of a key, and its name; without one, the first 8 hexadecimal digits of that."""
    *name, key = entry.split()
    digest = hashlib.sha256(key.encode()).digest()
    return digest, " ".join(name) or digest.hex()[:8]


class ApiKeyMiddleware:
    """401 unless `Authorization: Bearer KEY` (or `x-api-key`) names one of the keys.

    Holders of different keys share no prefix cache: how fast an answer comes would tell one what
    another asked.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or needs_no_key(scope["path"]):
            await self._app(scope, receive, send)
            return
        key = _key_of(scope["headers"])
        digest = hashlib.sha256(key).digest()
        name = self._keys.name_of(digest)
        if name is not None:
            scope.setdefault("state", {}).update({OWNER: digest, KEY_NAME: name})
            await self._app(scope, receive, send)
            return
        # In OpenAI's words, as far as they go.
        reason, code = "You did not provide an API key", None
        if key:
            reason, code = "Incorrect API key provided", "invalid_api_key"
        headers = "`Authorization: Bearer KEY` (or `x-api-key: KEY`)"
        message = f"{reason}: send a key of this server in the header {headers}"
        await refuse(send, 401, message, code, [(b"www-authenticate", b"Bearer")])


def _key_of(headers: Headers) -> bytes:
    """The key that a request sends; b"" if it sends none."""
    key = b""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            key = value[7:].strip()
        elif name == b"x-api-key":
            key = value.strip()
    return key


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches a server that listens on `address`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def split_host(host: str) -> tuple[str, str] | None:
    """Name and port ("" for none) of a Host, or of an IPv6 address without brackets."""
    bare = host.count(":") > 1 and "[" not in host
    found = HOST.fullmatch(f"[{host}]".lower() if bare else host.lower())
    if found is None:
        return None
    address, name, port = found.groups("")
    return address or name.rstrip("."), port


def accepted_hosts(config: ServerConfig) -> tuple[str, ...] | None:
    """The Hosts that are answered, those without a port at any port; None: all."""
    allowed = config.allowed_hosts
    if "*" in allowed or not (allowed or is_loopback(config.host)):
        return None
    return tuple(dict.fromkeys([*LOOPBACK_NAMES, config.host, *allowed]))


class BrowserGuard:
    """403 for a Host that is not accepted, and for a change requested by a page of another origin.

    A request without an Origin is not a page's, one without a Host not a browser's.  Where there
    are keys, Origin does not matter: a browser does not add a key by itself.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = accepted_hosts(config)
        self._host_ports = frozenset(split_host(host) for host in self._hosts or ()) - {None}
        self._origins = config.allowed_origins
        self._any_origin = bool(config.api_keys) or "*" in config.allowed_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refuse(send, 403, *refusal, [])

    def _refusal(self, scope: Scope) -> tuple[str, str] | None:
        """Message and code, for a request that is refused."""
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        for host in filter(None, hosts):
            if self._hosts is not None and not self._accepts(host):
                return self._foreign_host(host), "host_not_allowed"
        if self._any_origin or scope["method"] in SAFE_METHODS:
            return None
        for name, value in scope["headers"]:
            origin = value.decode("latin-1")
            if (
                name == b"origin"
                and origin not in self._origins
                and self._is_foreign(origin, hosts)
            ):
                return _foreign_origin(origin, scope["method"]), "origin_not_allowed"
        return None

    def _accepts(self, host: str) -> bool:
        name_port = split_host(host)
        if name_port is None:
            return False
        return name_port in self._host_ports or (name_port[0], "") in self._host_ports

    def _is_foreign(self, origin: str, hosts: list[str]) -> bool:
        """Whether a page sends this, of an origin that is not this server's."""
        scheme, separator, rest = origin.lower().partition("://")
        if separator and scheme not in PAGE_SCHEMES:
            return False
        page, port = split_host(rest), DEFAULT_PORTS.get(scheme)
        if page is None or port is None:
            return True
        # The server's other names are the same server, at the port of the request.
        return not any(
            (own[1] or port) == (page[1] or port) and (own[0] == page[0] or self._accepts(rest))
            for own in filter(None, map(split_host, hosts))
        )

    def _foreign_host(self, host: str) -> str:
        name_port = split_host(host)
        return (
            f"the header Host is `{host[:MAX_SHOWN]}`: this server answers to "
            f"{', '.join(self._hosts or ())} only; to let it answer to this name, too, start it "
            f"with --allowed-hosts {name_port[0][:MAX_SHOWN] if name_port else 'NAME'}"
        )


def _foreign_origin(origin: str, method: str) -> str:
    return (
        f"the header Origin is `{origin[:MAX_SHOWN]}`: without API keys, {method} is only taken "
        "from pages of this server's own origin; to let pages of this one ask, too, start the "
        f"server with --allowed-origins {origin[:MAX_SHOWN]}"
    )
