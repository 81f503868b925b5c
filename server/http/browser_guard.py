"""Which pages a browser may send requests from: the headers Host and Origin, which no page chooses.

A page whose name is made to resolve to this machine (DNS rebinding) has that name in Host.  A page
of another origin that posts a form here has that origin in Origin.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.types import ASGIApp, Receive, Scope, Send

from server.config import ServerConfig
from server.http.refusal import refuse

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
READING = frozenset({"GET", "HEAD", "OPTIONS"})  # methods that change nothing
DEFAULT_PORTS = {"http": "80", "https": "443"}
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")
# Other schemes belong to applications and browser extensions that were installed on purpose.
SCHEMES_OF_PAGES = frozenset({"http", "https", "file"})
SHOWN = 100  # characters of a header


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
    given = config.allowed_hosts
    if "*" in given or not (given or is_loopback(config.host)):
        return None
    return tuple(dict.fromkeys([*LOOPBACK_NAMES, config.host, *given]))


class BrowserGuard:
    """403 for a Host that is not accepted, and for what a page of another origin wants changed.

    Without an Origin no page asks.  Where there are keys, Origin does not matter: a browser does
    not add a key by itself.  Without a Host no browser asks.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._hosts = accepted_hosts(config)
        self._places = frozenset(split_host(host) for host in self._hosts or ()) - {None}
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
        if self._any_origin or scope["method"] in READING:
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
        place = split_host(host)
        return place is not None and (place in self._places or (place[0], "") in self._places)

    def _is_foreign(self, origin: str, hosts: list[str]) -> bool:
        """Whether a page sends this, of an origin that is not this server's."""
        scheme, separator, rest = origin.lower().partition("://")
        if separator and scheme not in SCHEMES_OF_PAGES:
            return False
        page, port = split_host(rest), DEFAULT_PORTS.get(scheme)
        if page is None or port is None:
            return True
        asked = [place for place in map(split_host, hosts) if place is not None]
        # The server's other names are the same server, at the port where it was asked.
        return not any(
            (own[1] or port) == (page[1] or port) and (own[0] == page[0] or self._accepts(rest))
            for own in asked
        )

    def _foreign_host(self, host: str) -> str:
        place = split_host(host)
        return (
            f"the header Host is `{host[:SHOWN]}`: this server answers to "
            f"{', '.join(self._hosts or ())} only; to let it answer to this name, too, start it "
            f"with --allowed-hosts {place[0][:SHOWN] if place else 'NAME'}"
        )


def _foreign_origin(origin: str, method: str) -> str:
    return (
        f"the header Origin is `{origin[:SHOWN]}`: without API keys, {method} is only taken from "
        "pages of this server's own origin; to let pages of this one ask, too, start the server "
        f"with --allowed-origins {origin[:SHOWN]}"
    )
