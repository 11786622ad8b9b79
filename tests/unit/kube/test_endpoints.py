import socket

import pytest

from gradsharding.kube.endpoints import EndpointRefused, check_endpoint, resolve_host
from gradsharding.kube.settings import DEFAULT_ENDPOINTS

API = {("10.96.0.1", 443), ("192.0.2.1", 6443), ("fd00::1", 6443)}


def check(endpoint, *addresses, allowed=DEFAULT_ENDPOINTS, region="us-east-1"):
    check_endpoint(endpoint, region, allowed, API, lambda host: addresses)


@pytest.mark.parametrize(
    ("endpoint", "allowed"),
    [
        ("http://minio.storage.svc:9000", DEFAULT_ENDPOINTS),
        ("http://minio.storage.svc.cluster.local:9000", DEFAULT_ENDPOINTS),
        ("https://MINIO.storage.SVC", DEFAULT_ENDPOINTS),
        (None, DEFAULT_ENDPOINTS),
        ("https://s3.eu-central-1.amazonaws.com", DEFAULT_ENDPOINTS),
        ("http://store.example:9000", ["store.example"]),
        ("http://store.example:9000", ["store.example:9000"]),
        ("http://192.0.2.1:9000", ["192.0.2.1:9000"]),
    ],
)
def test_allowed(endpoint, allowed):
    check(endpoint, "192.0.2.1", allowed=allowed)


@pytest.mark.parametrize(
    ("endpoint", "allowed"),
    [
        ("http://store.example:9000", DEFAULT_ENDPOINTS),
        ("http://minio.svc.example", DEFAULT_ENDPOINTS),
        ("http://minio.storage.svc@store.example:9000", DEFAULT_ENDPOINTS),
        ("http://store.example:9001", ["store.example:9000"]),
        ("http://192.0.2.7:9000", DEFAULT_ENDPOINTS),
        (None, ["*.svc"]),
    ],
)
def test_not_on_the_list(endpoint, allowed):
    with pytest.raises(EndpointRefused, match="GRADSHARDING_ALLOWED_ENDPOINTS"):
        check(endpoint, "192.0.2.7", allowed=allowed)


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.8.8", "169.254.169.254", "0.0.0.0", "224.0.0.1", "::1", "fe80::1", "::", "ff02::1",
     "::ffff:127.0.0.1", "::ffff:169.254.169.254"],
)  # fmt: skip
def test_addresses_that_no_list_allows(address):
    with pytest.raises(EndpointRefused, match="where no store"):
        check("http://store.svc", "192.0.2.9", address, allowed=["*"])


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [
        ("https://kubernetes.default.svc", "10.96.0.1"),
        ("http://other.svc:443", "10.96.0.1"),
        ("https://other.svc:6443", "192.0.2.1"),
        ("https://other.svc:6443", "fd00::1"),
        ("https://other.svc:6443", "::ffff:192.0.2.1"),
    ],
)
def test_the_api_server(endpoint, address):
    with pytest.raises(EndpointRefused, match="API server"):
        check(endpoint, address, allowed=["*"])


def test_another_port_of_the_same_machine():
    check("http://store.svc:9000", "10.96.0.1")


@pytest.mark.parametrize("host", ["localhost", "127.1", "0x7f000001", "2130706433"])
def test_however_loopback_is_written(host):
    try:
        addresses = resolve_host(host)
    except socket.gaierror:
        addresses = []
    if addresses:
        with pytest.raises(EndpointRefused):
            check_endpoint(f"http://{host}:9000", "us-east-1", ["*"], set(), resolve_host)


def test_a_name_that_nobody_knows(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror("no such name")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert resolve_host("nowhere.svc") == []
