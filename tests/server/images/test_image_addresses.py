"""Which addresses are public, and which hosts --image-urls allows."""

from __future__ import annotations

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.images.addresses import AllowedHosts, is_public

PUBLIC = [
    "1.1.1.1", "8.8.8.8", "93.184.216.34", "172.15.0.1", "172.32.0.1", "100.63.255.255",
    "100.128.0.1", "11.0.0.1", "192.167.0.1", "223.255.255.254",
    "2606:4700:4700::1111", "2a00:1450:4001:80e::200e", "2620:fe::fe",
]  # fmt: skip
NOT_PUBLIC = [
    "0.0.0.0", "0.1.2.3", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.127.255.255",
    "127.0.0.1", "127.255.255.254", "169.254.169.254", "172.16.0.1", "172.31.255.255",
    "192.0.0.170", "192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.1",
    "203.0.113.1", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
    "::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:8.8.8.8", "::ffff:0:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::808:808",
    "64:ff9b:1::a00:1", "100::1", "2001::1", "2001:0:7f00:1::", "2001:db8::1", "2002:7f00:1::",
    "2002:808:808::1", "3fff::1", "5f00::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%eth0",
    "fec0::1", "ff02::1", "ff0e::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_addresses_of_networks_apart_are_not_public(address: str) -> None:
    assert not is_public(address)


@given(st.ip_addresses(network="127.0.0.0/8") | st.ip_addresses(network="10.0.0.0/8"))
def test_no_form_of_a_private_address_is_public(address: object) -> None:
    number = int(ip_address(str(address)))
    mapped = ["::ffff:0:0", "::", "64:ff9b::", "64:ff9b:1::", "::ffff:0:0:0"]
    assert not is_public(str(address))
    for prefix in mapped:
        assert not is_public(str(ip_address(int(ip_address(prefix)) + number)))
    assert not is_public(str(ip_address(int(ip_address("2002::")) + (number << 80))))


@given(st.ip_addresses(v=6))
def test_a_public_ipv6_address_is_of_the_part_that_hosts_have(address: object) -> None:
    if is_public(str(address)):
        assert ip_address(str(address)) in ip_network("2000::/3")


@pytest.mark.parametrize(
    ("text", "host", "port", "expected"),
    [
        ("any", "example.com", 443, True),
        ("any", "example.com", 80, True),
        ("any", "example.com", 22, False),
        ("any", "example.com", 6379, False),
        ("", "example.com", 443, False),
        ("example.com", "example.com", 443, True),
        ("example.com", "example.com", 8443, False),
        ("example.com", "www.example.com", 443, False),
        ("example.com", "example.com.evil.net", 443, False),
        ("example.com", "notexample.com", 443, False),
        ("example.com:8443", "example.com", 8443, True),
        ("example.com:8443", "example.com", 443, False),
        ("*.example.com", "a.example.com", 443, True),
        ("*.example.com", "a.b.example.com", 80, True),
        ("*.example.com", "example.com", 443, False),
        ("*.example.com", "aexample.com", 443, False),
        (" Example.COM , b.org ", "b.org", 443, True),
        ("example.com,b.org", "example.com", 80, True),
    ],
)
def test_a_list_allows_its_hosts_and_no_others(
    text: str, host: str, port: int, expected: bool
) -> None:
    assert AllowedHosts.parse(text).allows(host, port) is expected


@pytest.mark.parametrize(
    "text", ["https://a.com", "a.com/x", "a.com:0", "a.com:99999", "any,a.com", "a b", "*", "-a"]
)
def test_what_is_no_host_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no host: write names such as"):
        AllowedHosts.parse(text)
