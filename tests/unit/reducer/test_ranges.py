"""The ranged reader against a server that misbehaves."""

import time

import pytest
from unit.reducer.object_server import ObjectServer, error, reply, reset

from gradsharding_reducer.access import Access
from gradsharding_reducer.cancellation import Cancellation
from gradsharding_reducer.exchange import Channel, Patience
from gradsharding_reducer.failures import ReducerFailure, Refused
from gradsharding_reducer.ranges import read_range
from gradsharding_reducer.task import Outcome, Refusal, SourceObject, UrlKind

BODY = bytes(range(256)) * 64
QUICK = Patience(idle_seconds=0.3, slowest_rate=1e5, tries=4, first_delay=0.01, longest_delay=0.02)
OFFSET, LENGTH = 100, 5000


class Scene:
    """One object, one channel, and a fault for the first so many GETs of it."""

    def __init__(self, fault=None, times=1000):
        faults = lambda method, path, nth: fault if nth <= times else None  # noqa: E731
        self.server = ObjectServer(faults)
        self.etag = self.server.put("u", BODY)

    def __enter__(self):
        self.server.__enter__()
        self.cancellation = Cancellation()
        access = Access((self.server.origin,))
        self.channel = Channel(access, self.cancellation, time.monotonic() + 600, QUICK)
        return self

    def __exit__(self, *exc):
        self.channel.close()
        self.server.__exit__(*exc)

    def read(self, etag=None):
        slot = memoryview(bytearray(LENGTH))
        read_range(self.channel, 3, SourceObject(self.server.url("u"), etag or self.etag), OFFSET, slot)
        return bytes(slot)


WANTED = BODY[OFFSET : OFFSET + LENGTH]
RANGE = f"bytes {OFFSET}-{OFFSET + LENGTH - 1}/{len(BODY)}"


def partial(body=WANTED, length=LENGTH, content_range=RANGE, **headers):
    headers = {"Content-Range": content_range, "Content-Length": str(length), **headers}

    def answer(handler):
        reply(handler, 206, body, headers)
        if len(body) < length:
            handler.close_connection = True

    return answer


def test_a_range_is_read_and_pinned_with_a_quoted_etag():
    with Scene() as scene:
        assert scene.read() == WANTED
        assert scene.read(etag=f'"{scene.etag}"') == WANTED  # tasks may hold it as the store gave it
        assert {headers["If-Match"] for headers in scene.server.headers} == {f'"{scene.etag}"'}
        assert scene.server.headers[0]["Host"] == scene.server.origin.split("//")[1]
        assert scene.server.connections == 1
        assert scene.channel.retries == 0


def reset_in_mid_body(handler):
    handler.send_response(206)
    handler.send_header("Content-Length", str(LENGTH))
    handler.send_header("Content-Range", RANGE)
    handler.end_headers()
    handler.wfile.write(WANTED[:2000])
    reset(handler)


def slow_drip(handler):
    """Never idle long enough for the socket's timeout, and never done."""
    headers = {"Content-Range": RANGE, "Content-Length": str(LENGTH)}
    reply(handler, 206, WANTED, headers, bytes_per_second=LENGTH / 60)


def silence(handler):
    time.sleep(2)
    handler.close_connection = True


def hang_up(handler):
    handler.close_connection = True


@pytest.mark.parametrize(
    "fault",
    [
        lambda handler: error(handler, 503, "SlowDown"),
        lambda handler: error(handler, 500, "InternalError"),
        lambda handler: error(handler, 429, "TooManyRequests"),
        lambda handler: error(handler, 400, "RequestTimeout"),
        partial(body=WANTED[:1000]),
        reset_in_mid_body,
        slow_drip,
        silence,
        hang_up,
        lambda handler: handler.wfile.write(b"nonsense\r\n\r\n"),
    ],
    ids=["503", "500", "429", "400-timeout", "short-body", "reset", "drip", "silence", "hang-up", "nonsense"],
)
def test_what_may_pass_is_asked_for_again(fault):
    with Scene(fault, times=2) as scene:
        assert scene.read() == WANTED
        assert scene.channel.retries == 2
        assert scene.server.count("GET", "u") == 3


def test_it_gives_up_in_the_end_with_a_sentence_and_without_the_url():
    with Scene(lambda handler: error(handler, 503, "SlowDown")) as scene:
        with pytest.raises(
            ReducerFailure, match=r"reading source 3: .* in 4 tries, the last time: 503 SlowDown"
        ) as caught:
            scene.read()
        assert scene.server.count("GET", "u") == 4
        assert "http" not in str(caught.value)


def test_after_the_budget_it_gives_up_earlier():
    with Scene(lambda handler: error(handler, 503, "SlowDown")) as scene:
        scene.channel = Channel(Access((scene.server.origin,)), Cancellation(), time.monotonic() - 1, QUICK)
        with pytest.raises(ReducerFailure, match="in 3 tries"):
            scene.read()


def test_nobody_there_is_a_sentence():
    with Scene() as scene:
        origin = scene.server.origin
        url = scene.server.url("u")
    channel = Channel(Access((origin,)), Cancellation(), time.monotonic() + 600, QUICK)
    with pytest.raises(ReducerFailure, match="Connection refused"):
        read_range(channel, 0, SourceObject(url, "e"), 0, memoryview(bytearray(1)))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lambda handler: reply(handler, 200, BODY), "answered 200 where 206 is right .*Range header"),
        (partial(content_range=f"bytes 0-{LENGTH - 1}/{len(BODY)}"), "asked for bytes 100-5099"),
        (partial(content_range="nonsense"), "asked for bytes 100-5099"),
        (partial(body=WANTED[:10], length=10), "the store sent 10 bytes"),
        (lambda handler: reply(handler, 302, b"", {"Location": "http://elsewhere/"}), "redirects are not followed"),
        (lambda handler: error(handler, 416, "InvalidRange"), "refused with 416 InvalidRange"),
    ],
    ids=["200", "other-range", "no-range", "short-range", "redirect", "416"],
)
def test_a_store_that_breaks_the_protocol_is_not_asked_again(fault, sentence):
    with Scene(fault) as scene:
        with pytest.raises(ReducerFailure, match=sentence) as caught:
            scene.read()
        assert scene.server.count("GET", "u") == 1
        assert "http:" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "outcome", "status", "code"),
    [
        (lambda handler: error(handler, 404, "NoSuchKey"), Outcome.SOURCE_GONE, 404, "NoSuchKey"),
        (lambda handler: error(handler, 412, "PreconditionFailed"), Outcome.SOURCE_GONE, 412, "PreconditionFailed"),
        (partial(ETag='"another"'), Outcome.SOURCE_GONE, 206, "ETagChanged"),
        (lambda handler: error(handler, 403, "AccessDenied"), Outcome.DENIED, 403, "AccessDenied"),
        (lambda handler: error(handler, 400, "ExpiredToken"), Outcome.DENIED, 400, "ExpiredToken"),
        (lambda handler: reply(handler, 403, b"<Code>\x1b[31m</Code>"), Outcome.DENIED, 403, ""),
    ],
    ids=["404", "412", "etag", "403", "token", "hostile-code"],
)
def test_refusals_are_answers(fault, outcome, status, code):
    with Scene(fault) as scene:
        with pytest.raises(Refused) as caught:
            scene.read()
        assert caught.value.outcome is outcome
        assert caught.value.refusal == Refusal(UrlKind.SOURCE, 3, status, code)
        assert scene.server.count("GET", "u") == 1


def test_an_object_that_changed_since_is_gone():
    with Scene() as scene:
        assert scene.read() == WANTED
        scene.server.put("u", BODY[::-1])
        with pytest.raises(Refused) as caught:
            scene.read()
        assert caught.value.refusal.status == 412


@pytest.mark.parametrize(
    ("url", "refused"),
    [
        ("http://127.0.0.1:1/u", True),
        ("https://127.0.0.1/u", True),
        ("file:///etc/passwd", False),
        ("http://user@127.0.0.1/u", False),
        ("http://127.0.0.1:99999/u", False),
        ("http://127.0.0.1/u\r\nX: y", False),
        ("nonsense", False),
    ],
)
def test_other_origins_are_denied_and_other_urls_are_failures(url, refused):
    with Scene() as scene:
        with pytest.raises(Refused if refused else ReducerFailure) as caught:
            read_range(scene.channel, 1, SourceObject(url, "e"), 0, memoryview(bytearray(1)))
        if refused:
            assert caught.value.refusal == Refusal(UrlKind.SOURCE, 1, None, "OriginNotAllowed")
        assert scene.server.requests == []


@pytest.mark.parametrize(
    ("allowed", "url"),
    [
        ("http://s:80", "http://s/x"), ("http://s", "http://s:80/x"), ("https://S:443", "https://s/x"),
        ("https://[::1]", "https://[::1]:443/x"), ("http://a http://s:9", "http://s:9/x"),
    ],
)  # fmt: skip
def test_default_ports_and_case_do_not_matter(allowed, url):
    Access(tuple(allowed.split())).address(url, UrlKind.SOURCE)


def test_without_configuration_nothing_is_allowed():
    with pytest.raises(Refused):
        Access.from_environment({}).address("http://s/x", UrlKind.RECORD)
