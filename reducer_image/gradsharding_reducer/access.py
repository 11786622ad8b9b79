"""Which origins a reducer may talk to, and whom it trusts. Both are configuration of the function, never part of a
task."""

from __future__ import annotations

import http.client
import ssl
import threading
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from gradsharding_reducer.failures import ReducerFailure, Refused
from gradsharding_reducer.task import Outcome, Refusal, UrlKind

if TYPE_CHECKING:
    from collections.abc import Mapping

ORIGINS_VARIABLE = "GRADSHARDING_ALLOWED_ORIGINS"
"""``scheme://host:port`` of the stores, separated by spaces; default ports may be left out. Unset: none is allowed."""

CA_VARIABLE = "GRADSHARDING_CA_FILE"
"""A PEM file with certificates to trust besides the system's."""

CA_PEM_VARIABLE = "GRADSHARDING_CA_PEM"
"""The same as text, for platforms that give a function an environment but no files."""

_PORTS = {"http": 80, "https": 443}


class Address(NamedTuple):
    """A URL taken apart: where to connect, what to send as Host (it is signed, so exactly as written), and the request
    target."""

    scheme: str
    host: str
    port: int
    netloc: str
    target: str

    @property
    def origin(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_address(url: str) -> Address:
    """Raises ValueError, which does not quote the URL: it may hold a signature."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ValueError("is not a URL") from None
    if parts.scheme not in _PORTS or not parts.hostname or "@" in parts.netloc:
        raise ValueError("is not an http or https URL of the form scheme://host:port")
    target = parts.path or "/"
    if parts.query:
        target += f"?{parts.query}"
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise ValueError("holds characters that a URL cannot hold")
    return Address(parts.scheme, parts.hostname, port or _PORTS[parts.scheme], parts.netloc, target)


class Access:
    """The allowed origins, and connections to them. TLS is set up when the first https connection is made."""

    def __init__(self, origins: tuple[str, ...], ca_file: str | None = None, ca_pem: str | None = None) -> None:
        """Raises ReducerFailure when an origin is not of the form ``scheme://host:port``."""
        try:
            self._origins = frozenset(parse_address(origin).origin for origin in origins)
        except ValueError as error:
            raise ReducerFailure(f"{ORIGINS_VARIABLE}: one of the origins {error}") from None
        self._ca_file = ca_file
        self._ca_pem = ca_pem
        self._tls: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Access:
        origins = tuple(environment.get(ORIGINS_VARIABLE, "").split())
        return Access(origins, environment.get(CA_VARIABLE) or None, environment.get(CA_PEM_VARIABLE) or None)

    def address(self, url: str, kind: UrlKind, source: int | None = None) -> Address:
        """Raises Refused (Denied, ``OriginNotAllowed``) when the URL leads elsewhere, ReducerFailure when it is
        none."""
        try:
            address = parse_address(url)
        except ValueError as error:
            raise ReducerFailure(f"the task's {kind} URL {error}") from None
        if address.origin not in self._origins:
            raise Refused(Outcome.DENIED, Refusal(kind, source, None, "OriginNotAllowed"))
        return address

    def connect(self, address: Address, timeout: float) -> http.client.HTTPConnection:
        """A connection, not opened yet."""
        if address.scheme == "http":
            return http.client.HTTPConnection(address.host, address.port, timeout=timeout)
        return http.client.HTTPSConnection(address.host, address.port, timeout=timeout, context=self._trust())

    def _trust(self) -> ssl.SSLContext:
        with self._lock:  # prefetch threads ask at once, and each context would take megabytes
            if self._tls is None:
                context = ssl.create_default_context()
                if self._ca_file or self._ca_pem:
                    try:
                        context.load_verify_locations(self._ca_file, cadata=self._ca_pem)
                    except OSError as error:  # SSLError is one
                        reason = error.strerror or type(error).__name__
                        variable = CA_VARIABLE if self._ca_file else CA_PEM_VARIABLE
                        raise ReducerFailure(f"{variable}: cannot read the certificates: {reason}") from None
                self._tls = context
            return self._tls
