"""Addresses of machines that have IPv6 alone."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from mslime import network


@pytest.fixture(autouse=True)
def loopback() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")


def test_a_port_is_in_use_where_somebody_listens() -> None:
    with network.listen("::1") as server:
        port = server.getsockname()[1]
        assert network.port_in_use("::1", port)
    assert not network.port_in_use("::1", port)


def test_the_own_address_is_of_the_servers_kind() -> None:
    assert network.own_address("http://[::1]:30000") == "::1"


def test_a_written_url_can_be_read(tmp_path: Path) -> None:
    with network.listen("::1") as server:
        url = network.write_address(tmp_path / "address", server, "key")
        assert (urlsplit(url).hostname, urlsplit(url).port) == ("::1", server.getsockname()[1])


def test_an_ipv6_address_stands_in_brackets_in_a_url() -> None:
    assert network.url_of("::1", 5) == "http://[::1]:5" and network.url_of("10.0.0.1", 5) == "http://10.0.0.1:5"
