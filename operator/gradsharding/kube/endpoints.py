"""Which stores a round may name. Whoever may create rounds must not be able to reach whatever the operator can.

Loopback, link-local and the API server are refused whatever the list says, by address too: a name that leads there
counts as the address. A name that changes its address between this look and the connection is a stated limit.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

from gradsharding.errors import GradsShardingError

Resolve = Callable[[str], Iterable[str]]


class EndpointRefused(GradsShardingError):
    """The store endpoint of a round is not allowed here."""


def check_endpoint(
    endpoint: str | None,
    region: str,
    allowed: Collection[str],
    api_servers: Collection[tuple[str, int]],
    resolve: Resolve,
) -> None:
    """Raises EndpointRefused. ``endpoint`` None is AWS S3 of the region; ``api_servers`` are (address, port)."""
    suffix = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
    parts = urlsplit(endpoint or f"https://s3.{region}.{suffix}")
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not any(fnmatchcase(host, glob) or fnmatchcase(f"{host}:{port}", glob) for glob in allowed):
        raise EndpointRefused(
            f"spec.store.endpoint {host}:{port} is not among the endpoints that this operator allows "
            f"({', '.join(allowed)}): ask its administrator to add it to GRADSHARDING_ALLOWED_ENDPOINTS"
        )
    for address in resolve(host):
        ip = ipaddress.ip_address(address)
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        if ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast:
            raise EndpointRefused(f"spec.store.endpoint {host} leads to {ip}, where no store of a round may be")
        if (str(ip), port) in api_servers:
            raise EndpointRefused(f"spec.store.endpoint {host}:{port} is the Kubernetes API server")


def resolve_host(host: str) -> list[str]:
    """The addresses of a host; none when the name is unknown, which the connection will tell better."""
    try:
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError:
        return []
