"""How requests reach an S3 bucket: minio-py signs, urllib3 sends.

Each request is a presigned URL of ours, sent by this loop and no other. So every caller decides whether its request may
be repeated, and each try is signed anew, by the store's clock.
"""

from __future__ import annotations

import random
import ssl
import time
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit, urlunsplit

import urllib3
from minio import Minio
from minio.signer import presign_v4
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError, SSLError

from gradsharding import s3_xml
from gradsharding.errors import StoreRefused
from gradsharding.s3_refusal import no_answer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from minio.credentials.providers import Provider

BUSY = frozenset({429, 500, 502, 503, 504})
"""Statuses that say nothing about the request itself."""

MAX_XML = 32 << 20
_LIFETIME = timedelta(minutes=15)
_MAX_LIFETIME = timedelta(days=7)
"""S3's own limit for presigned URLs."""
_SKEW = timedelta(seconds=60)


@dataclass(frozen=True)
class Answer:
    """What came back. Headers are looked up in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @cached_property
    def code(self) -> str:
        """The store's error code; empty when there is none that looks like one."""
        return s3_xml.error_code(self.body)

    @property
    def no_such_key(self) -> bool:
        return self.status == 404 and self.code in ("NoSuchKey", "NoSuchVersion")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a store, in seconds, and how often to ask it."""

    connect: float = 5.0
    read: float = 60.0
    """Of silence, not of the whole answer."""
    tries: int = 5
    pause: float = 0.5
    """Before the second try; it doubles from try to try."""

    def longest_pause(self, failures: int) -> float:
        """Seconds after so many failures (from 1)."""
        return min(8.0, self.pause * 2.0 ** (failures - 1))

    def sleep(self, failures: int) -> None:
        """Between half of the pause and the whole, so that many clients do not come back at once."""
        time.sleep(self.longest_pause(failures) * random.uniform(0.5, 1.0))  # noqa: S311


class Transport:
    """Signed requests to one bucket, by many threads. Asks nobody when it is made.

    ``endpoint`` is ``http[s]://host[:port]``, None for AWS S3 of the region. Raises StoreRefused when endpoint,
    bucket name, region or certificates cannot be right.
    """

    def __init__(
        self,
        endpoint: str | None,
        bucket: str,
        region: str,
        credentials: Provider,
        ca_pem: str | None,
        patience: Patience,
    ) -> None:
        self.bucket = bucket
        self.patience = patience
        self._region = region
        self._credentials = credentials
        self._clock_offset = timedelta(0)
        """The store's clock minus ours; zero while they roughly agree."""
        where = urlsplit(endpoint or f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}")
        secure = where.scheme == "https"
        plain = where.scheme in ("http", "https") and where.hostname and where.path in ("", "/")
        if not plain or where.query or where.fragment or "@" in where.netloc:
            message = (
                "The store's endpoint must be of the form http://host:port or https://host:port, without path or keys."
            )
            raise StoreRefused(message, "InvalidEndpoint")
        self._pool = _pool(_trust(ca_pem) if secure else None, patience)
        try:
            self._minio = Minio(
                where.netloc, region=region, secure=secure, credentials=credentials, http_client=self._pool
            )
            # Nothing is signed without credentials: it shows where minio-py puts the bucket, in the path or the host.
            unsigned = Minio(where.netloc, region=region, secure=secure, http_client=self._pool)
            sample = urlsplit(unsigned.get_presigned_url("GET", bucket, "x"))
        except ValueError as error:
            what = f"endpoint {where.netloc!r}, bucket {bucket!r} or region {region!r}"
            message = f"The store's {what} cannot be used: {error}."
            raise StoreRefused(message, "InvalidStore") from None
        self.origin = f"{sample.scheme}://{sample.netloc}"
        self._path = sample.path.removesuffix("x")

    def sign(self, method: str, key: str, query: Mapping[str, str], lifetime: timedelta) -> str:
        """A URL for this method, object and query, for 1 second to 7 days from now. An empty key means the bucket."""
        now = datetime.now(UTC) + self._clock_offset
        lifetime = min(max(lifetime, timedelta(seconds=1)), _MAX_LIFETIME)
        if key and (not key.strip() or {".", ".."} & set(key.split("/"))):
            # minio-py refuses these, since servers and proxies disagree on what such a path means.
            raise StoreRefused(
                f"The key {key!r} cannot be used: it is blank or has '.' or '..' between slashes.", "InvalidKey"
            )
        try:
            if key:
                return self._minio.get_presigned_url(
                    method, self.bucket, key, expires=lifetime, request_date=now, extra_query_params=dict(query)
                )
            keys = self._credentials.retrieve()
        except ValueError:
            raise StoreRefused(
                f"There are no keys for the store {self.origin}: set them (anew).", "NoCredentials"
            ) from None
        # That method insists on a key, so for listings and bulk removal it is minio-py's signer itself.
        token = {"X-Amz-Security-Token": keys.session_token} if keys.session_token else {}
        pairs = "&".join(
            f"{quote(name, safe='')}={quote(value, safe='')}" for name, value in {**query, **token}.items()
        )
        url = urlsplit(f"{self.origin}{self._path}?{pairs}")
        seconds = int(lifetime.total_seconds())
        return urlunsplit(
            presign_v4(method=method, url=url, region=self._region, credentials=keys, date=now, expires=seconds)
        )

    def ask(
        self,
        action: str,
        method: str,
        key: str = "",
        query: Mapping[str, str] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        limit: int = MAX_XML,
        once: bool = False,
    ) -> Answer:
        """The store's answer of at most ``limit`` bytes, of any status but a busy one. ``action`` is for the messages.

        A connection that fails, a 429 or a 5xx is asked again. Not so with ``once``: then nothing that may have reached
        the store is repeated, and a busy answer is returned. Raises StoreUnreachable when there was no answer.
        """
        cause = ""
        for failures in range(self.patience.tries):
            if failures:
                self.patience.sleep(failures)
            offset = self._clock_offset
            url = self.sign(method, key, query or {}, _LIFETIME)
            try:
                answer = self._send(method, url, headers or {}, body, limit)
            except (NewConnectionError, ConnectTimeoutError) as error:
                cause = _cause(error)  # nothing was sent: that may always be repeated
            except HTTPError as error:
                self._check_certificate(error)
                cause = _cause(error)
                if once:
                    break
            else:
                if answer.status == 403 and self._clock_offset != offset:
                    continue  # refused for our clock, which is corrected now
                if once or (answer.status not in BUSY and answer.code != "RequestTimeout"):
                    return answer
                cause = answer.code or f"HTTP {answer.status}"
        raise no_answer(self.origin, self.bucket, action, cause)

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None, limit: int) -> Answer:
        sent = datetime.now(UTC)
        response = self._pool.urlopen(method, url, body=body, headers=headers, redirect=False, preload_content=False)
        self._clock_offset = clock_offset(response.headers.get("Date", ""), sent, datetime.now(UTC))
        received = bytearray()
        try:
            while len(received) <= limit and (more := response.read(limit + 1 - len(received), decode_content=False)):
                received += more
        finally:
            response.close() if len(received) > limit else response.release_conn()
        if len(received) > limit:
            message = (
                f"The store {self.origin} sent more than the {limit} bytes that were asked for: check the endpoint."
            )
            raise StoreRefused(message, "TooLong")
        return Answer(response.status, response.headers, bytes(received))

    def _check_certificate(self, error: HTTPError) -> None:
        if isinstance(error, SSLError) and error.args and isinstance(error.args[0], ssl.SSLCertVerificationError):
            mend = "give the certificate of its CA, or mend the host name"
            message = f"The certificate of the store {self.origin} is not trusted: {mend}."
            raise StoreRefused(message, "CertificateNotTrusted") from None


def clock_offset(date: str, sent: datetime, received: datetime) -> timedelta:
    """The store's clock minus ours, by an answer's Date header; zero when they agree to a minute."""
    try:
        theirs = parsedate_to_datetime(date).astimezone(UTC)
    except (ValueError, TypeError, OverflowError):
        return timedelta(0)
    return timedelta(0) if sent - _SKEW <= theirs <= received + _SKEW else theirs - received


@lru_cache(maxsize=64)
def _trust(ca_pem: str | None) -> ssl.SSLContext:
    """What connections trust: one context for all buckets with the same certificates, since each holds a megabyte of them."""
    trust = ssl.create_default_context()
    if ca_pem is not None:
        try:
            trust.load_verify_locations(cadata=ca_pem)
        except (ssl.SSLError, ValueError):
            raise StoreRefused(
                "The store's CA certificate is not PEM: give the text of a ca.crt.", "InvalidCertificate"
            ) from None
    return trust


def _pool(trust: ssl.SSLContext | None, patience: Patience) -> urllib3.PoolManager:
    return urllib3.PoolManager(
        maxsize=64,
        retries=False,
        timeout=urllib3.Timeout(connect=patience.connect, read=patience.read),
        ssl_context=trust,
    )


def _cause(error: HTTPError) -> str:
    """Our words, since urllib3's contain the URL with its signature."""
    match error:
        case NewConnectionError():
            return "no connection"
        case ConnectTimeoutError():
            return "connecting took too long"
        case ReadTimeoutError():
            return "no answer in time"
        case SSLError():
            return "TLS failed"
        case _:
            return "the connection broke"
