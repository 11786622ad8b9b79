"""One HTTP exchange with the store: sent, judged by its status, and repeated when that can help."""

from __future__ import annotations

import base64
import hashlib
import http.client
import random
import re
import socket
import ssl
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from gradsharding_reducer.failures import ReducerFailure, Refused, cancelled
from gradsharding_reducer.task import Header, Outcome, Refusal, UrlKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gradsharding_reducer.access import Access, Address
    from gradsharding_reducer.cancellation import Cancellation

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a store, and how often to ask it."""

    idle_seconds: float = 30.0
    """Without a byte, or for a connection."""
    slowest_rate: float = 64 * 1024.0
    """Bytes per second; a body that takes longer (after ``idle_seconds`` of grace) is asked for again."""
    tries: int = 10
    first_delay: float = 0.2
    """Seconds, doubled with each try, of which a random share is waited: *full jitter*."""
    longest_delay: float = 5.0
    tries_after_budget: int = 3
    """So many tries are made even when the task's time budget is used up."""


@dataclass(frozen=True, slots=True)
class Request:
    """``kind`` and ``source`` say in errors and refusals what the URL was for."""

    method: str
    url: str
    kind: UrlKind
    source: int | None = None
    headers: Mapping[str, str] | None = None
    body: memoryview | bytes = b""

    def __str__(self) -> str:
        verb = "reading" if self.method == "GET" else "writing"
        return f"{verb} {self.kind}" + ("" if self.source is None else f" {self.source}")


class _Again(Exception):
    """This try did not work out, the next one may."""


_SLICE = 1 << 20
_BATCH = 1 << 20
_ERROR_BODY = 4096
_MEND_TLS = "give its CA certificate to the function (spec.store.caSecretName, or GRADSHARDING_CA_FILE)"


class Channel:
    """One thread's keep-alive connections, one per origin. ``retries`` counts what was asked again."""

    def __init__(self, access: Access, cancellation: Cancellation, deadline: float, patience: Patience) -> None:
        """``deadline`` is when the task's time budget ends, in seconds of ``time.monotonic``."""
        self._access = access
        self._cancellation = cancellation
        self._deadline = deadline
        self._patience = patience
        self._connections: dict[str, http.client.HTTPConnection] = {}
        self._socket: socket.socket | None = None
        self._woken_from = 1
        self.retries = 0
        cancellation.on_cancel(self.interrupt)

    def interrupt(self) -> None:
        """From another thread: make a blocked send or receive return."""
        for connection in tuple(self._connections.values()):
            sock = connection.sock
            if sock is not None:
                with suppress(OSError):  # SSLSocket.shutdown would drop to plain text before it shuts down
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def exchange(self, request: Request, expected: int, receive: Callable[[http.client.HTTPResponse], T]) -> T:
        """Send and hand the answer with status ``expected`` to ``receive``, which reads the body.

        Raises Refused for 403, 404 and 412, ReducerFailure when retries are used up or would not help.
        """
        address = self._access.address(request.url, request.kind, request.source)
        tries = 0
        while True:
            if self._cancellation.requested:
                raise cancelled()
            try:
                return self._once(address, request, expected, receive)
            except ssl.SSLCertVerificationError as error:
                reason = error.verify_message
                raise ReducerFailure(
                    f"{request}: the store's certificate is not trusted ({reason}): {_MEND_TLS}"
                ) from None
            except (OSError, http.client.HTTPException, _Again) as error:
                self._drop(address)
                tries += 1
                self._back_off(request, tries, _reason(error))
            except BaseException:
                self._drop(address)
                raise

    def _back_off(self, request: Request, tries: int, reason: str) -> None:
        if self._cancellation.requested:
            raise cancelled()
        patience = self._patience
        delay = random.uniform(0, min(patience.longest_delay, patience.first_delay * 2 ** (tries - 1)))  # noqa: S311
        in_time = tries < patience.tries_after_budget or time.monotonic() + delay < self._deadline
        if tries >= patience.tries or not in_time:
            raise ReducerFailure(f"{request}: no good answer from the store in {tries} tries, the last time: {reason}")
        self.retries += 1
        self._cancellation.sleep(delay)

    def _once(
        self, address: Address, request: Request, expected: int, receive: Callable[[http.client.HTTPResponse], T]
    ) -> T:
        response = self._send(address, request)
        if response.status != expected:
            raise _judge(request, response, expected)
        result = receive(response)
        if response.will_close or not (response.isclosed() or response.length == 0):
            self._drop(address)  # what is left of the body would be taken for the next answer
        else:
            response.close()  # lets http.client use the connection again
        return result

    def _send(self, address: Address, request: Request) -> http.client.HTTPResponse:
        connection = self._connections.get(address.origin)
        if connection is None:
            connection = self._connections[address.origin] = self._access.connect(address, self._patience.idle_seconds)
        connection.putrequest(request.method, address.target, skip_host=True, skip_accept_encoding=True)
        connection.putheader("Host", address.netloc)
        for name, value in (request.headers or {}).items():
            connection.putheader(name, value)
        try:
            connection.endheaders()
            if self._socket is not connection.sock:
                self._socket, self._woken_from = connection.sock, 1
            if self._cancellation.requested:  # maybe while it connected: there was no socket to shut down
                raise cancelled()
            body = memoryview(request.body)
            for start in range(0, len(body), _SLICE):  # the socket's timeout is for the whole of one send
                connection.send(body[start : start + _SLICE])
        except (BrokenPipeError, ConnectionResetError) as error:
            # A store that refuses early may close before it has the body; what it said is worth more than the broken
            # pipe.
            try:
                return connection.getresponse()
            except (OSError, http.client.HTTPException):
                raise error from None
        return connection.getresponse()

    def _drop(self, address: Address) -> None:
        connection = self._connections.pop(address.origin, None)
        if connection is not None:
            connection.close()

    def receive_into(self, response: http.client.HTTPResponse, view: memoryview) -> None:
        """Fill ``view`` from the body. Raises when it is shorter, or comes too slowly."""
        patience = self._patience
        seconds = patience.idle_seconds + len(view) / patience.slowest_rate
        deadline = time.monotonic() + seconds
        # What came with the headers lies in the response's buffer: the socket must not be waited on for that, too.
        at = response.fp.readinto1(view[: len(response.fp.peek())]) if len(view) else 0
        while at < len(view):
            self._wake_from(min(_BATCH, len(view) - at))
            # readinto1 is one recv straight into the slot; readinto would loop, out of the deadline's sight.
            received = response.fp.readinto1(view[at:])
            if not received:
                raise _Again(f"the body ended after {at} of {len(view)} bytes")
            at += received
            if at < len(view) and time.monotonic() > deadline:
                raise _Again(f"only {at} of {len(view)} bytes came within {seconds:.1f} seconds")
            if self._cancellation.requested:
                raise cancelled()
        self._wake_from(1)
        response.length = 0  # http.client does not see what is read past it

    def _wake_from(self, count: int) -> None:
        """Let a recv return with ``count`` bytes, not with each segment: every return costs the folding thread its turn.

        Not with TLS, whose records have lengths of their own.
        """
        if self._woken_from != count and type(self._socket) is socket.socket:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._woken_from = count

    def get_header(self, header: Header, view: memoryview) -> None:
        """Read the output's header into ``view`` and check its digest."""

        def receive(response: http.client.HTTPResponse) -> None:
            if response.length != header.length:
                raise ReducerFailure(
                    f"the output's header has {response.length} bytes in the store, {header.length} in the plan"
                )
            self.receive_into(response, view)

        self.exchange(Request("GET", header.url, UrlKind.HEADER), 200, receive)
        if hashlib.sha256(view).hexdigest() != header.sha256:
            raise ReducerFailure("the output's header in the store is not the one of the plan: its SHA-256 differs")

    def put(self, url: str, kind: UrlKind, body: memoryview | bytes) -> str:
        """Write an object or part; its ETag, bare."""
        md5 = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        request = Request("PUT", url, kind, None, {"Content-Length": str(len(body)), "Content-MD5": md5}, body)

        def receive(response: http.client.HTTPResponse) -> str:
            response.read(_ERROR_BODY)
            return bare_etag(response.getheader("ETag", ""))

        etag = self.exchange(request, 200, receive)
        if not etag and kind is UrlKind.PART:
            raise ReducerFailure(f"{request}: the store answered without an ETag, as no S3 store does")
        return etag


def bare_etag(etag: str) -> str:
    """Without quotes, as tasks and results hold it."""
    return etag.removeprefix("W/").strip('"')


_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_AGAIN_CODES = {"RequestTimeout", "BadDigest", "IncompleteBody", "SlowDown"}
_DENIED_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "AuthorizationQueryParametersError"}


def _judge(request: Request, response: http.client.HTTPResponse, expected: int) -> Exception:
    """What a status other than the expected one means for this URL. Never reads more than a small body."""
    status = response.status
    if status < 400:
        hint = " (is there a proxy that drops the Range header?)" if (status, expected) == (200, 206) else ""
        hint = " (redirects are not followed: give the store's real endpoint)" if 300 <= status < 400 else hint
        return ReducerFailure(f"{request}: the store answered {status} where {expected} is right{hint}")
    code = _error_code(response)
    refusal = Refusal(request.kind, request.source, status, code)
    if status in _AGAIN or code in _AGAIN_CODES:
        return _Again(f"{status} {code}")
    if status in (401, 403) or code in _DENIED_CODES:
        return Refused(Outcome.DENIED, refusal)
    if request.kind is UrlKind.SOURCE and status in (404, 412):
        return Refused(Outcome.SOURCE_GONE, refusal)
    if status == 404:  # the upload is gone, or all of the round is
        return Refused(Outcome.CANCELLED, refusal)
    return ReducerFailure(f"{request}: the store refused with {status} {code}")


def _error_code(response: http.client.HTTPResponse) -> str:
    try:
        body = response.read1(_ERROR_BODY)
    except (OSError, http.client.HTTPException):
        body = b""
    found = re.search(rb"<Code>([A-Za-z0-9_.-]{1,64})</Code>", body)
    return found[1].decode() if found else ""


def _reason(error: Exception) -> str:
    if isinstance(error, _Again):
        return str(error)
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or type(error).__name__
