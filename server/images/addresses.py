"""Which hosts and addresses images may be fetched from.

A caller chooses the URL and the server opens the connection, so that it could be made to reach
what only the server can: services on its own host, in its network, or a cloud's metadata.  A name
is therefore resolved once, and every address of it has to be public.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

ANY = "any"
HOST = re.compile(r"(?P<name>(\*\.)?[a-z0-9]([a-z0-9._-]*[a-z0-9])?)(:(?P<port>[0-9]{1,5}))?")
USUAL_PORTS = (80, 443)

# IANA's special-purpose registries.  `is_global` knows fewer of these in older versions of Python.
NOT_PUBLIC_V4 = tuple(
    IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",  # carrier-grade NAT
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, with the metadata of most clouds
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.31.196.0/24",
        "192.52.193.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "192.175.48.0/24",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",
    )
)
PUBLIC_V6 = IPv6Network("2000::/3")  # all that is assigned to hosts of the internet
# Parts of it that are no host's own, or that lead to an IPv4 address.
NOT_PUBLIC_V6 = tuple(
    IPv6Network(network)
    for network in (
        "2001::/23",  # Teredo, benchmarking, ORCHID and other protocols
        "2001:db8::/32",
        "2002::/16",  # 6to4
        "2620:4f:8000::/48",
        "3ffe::/16",
        "3fff::/20",
    )
)


def is_public(address: str) -> bool:
    """Whether it is the address of a host of the internet.

    IPv4 addresses that are written as IPv6 are not public, whatever they are: mapped ones
    (::ffff:0:0/96), compatible ones (::/96), NAT64 (64:ff9b::/96, 64:ff9b:1::/48), 6to4, Teredo.
    """
    if "%" in address:  # a zone: the address is of one link
        return False
    found = ip_address(address)
    if isinstance(found, IPv4Address):
        return found.is_global and not any(found in network for network in NOT_PUBLIC_V4)
    assert isinstance(found, IPv6Address)
    return (
        found in PUBLIC_V6
        and found.is_global
        and not any(found in network for network in NOT_PUBLIC_V6)
    )


@dataclass(frozen=True)
class AllowedHosts:
    """The value of --image-urls: any host, or those of a list."""

    any_host: bool = False
    hosts: frozenset[tuple[str, int | None]] = frozenset()  # name and port; None: a usual port

    @classmethod
    def parse(cls, text: str) -> AllowedHosts:
        """Of "any", or names with commas between them, each with a port or without.

        "*.example.com" stands for all names that end so.  Raises ValueError.
        """
        words = [word.strip().lower() for word in text.split(",") if word.strip()]
        if words == [ANY]:
            return cls(any_host=True)
        hosts: set[tuple[str, int | None]] = set()
        for word in words:
            found = HOST.fullmatch(word)
            port = found and found["port"]
            if found is None or word == ANY or (port and not 0 < int(port) < 65536):
                raise ValueError(
                    f"{word} is no host: write names such as images.example.com, "
                    "*.example.com or images.example.com:8443, or the word any alone"
                )
            hosts.add((found["name"], int(port) if port else None))
        return cls(hosts=frozenset(hosts))

    @property
    def none(self) -> bool:
        return not self.any_host and not self.hosts

    def allows(self, host: str, port: int) -> bool:
        """host: in lower case, in the form that DNS has it"""
        usual = port in USUAL_PORTS
        if self.any_host:
            return usual
        names = {host, *(f"*.{rest}" for rest in _ends_of(host))}
        return any(
            (name, port) in self.hosts or (usual and (name, None) in self.hosts) for name in names
        )


def _ends_of(host: str) -> list[str]:
    parts = host.split(".")
    return [".".join(parts[start:]) for start in range(1, len(parts))]
