"""S3Bucket against a server that misbehaves: what is repeated, what is not, and what an answer means."""

from __future__ import annotations

import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

import pytest

from gradsharding import s3_transport
from gradsharding.credentials import static
from gradsharding.errors import ObjectGone, StoreRefused, StoreUnreachable
from gradsharding.s3 import S3Bucket
from gradsharding.s3_transport import Patience, clock_offset
from gradsharding.store import Completion

HANG_UP = None
DAY = timedelta(days=1)


def error(code):
    return f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>secret text</Message></Error>".encode()


@contextmanager
def scripted(*answers, headers=None):
    """A bucket on a server that gives these answers in turn, (status, body) or HANG_UP."""
    script = list(answers)
    requests = []

    class Front(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            """Silent."""

        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            requests.append((self.command, self.path, dict(self.headers), body))
            planned = script.pop(0)
            if planned is HANG_UP:
                self.close_connection = True
                return
            status, content, *more = planned
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(content)), **(headers or {}), **dict(*more)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer  # noqa: N815

    with ThreadingHTTPServer(("127.0.0.1", 0), Front) as server:
        server.daemon_threads = True
        server.block_on_close = False
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            bucket = S3Bucket.connect(
                f"http://127.0.0.1:{server.server_port}", "bucket", "us-east-1", static("KEY", "SECRET"),
                patience=Patience(pause=0.001),
            )  # fmt: skip
            bucket.requests = requests
            yield bucket
            assert script == []
        finally:
            server.shutdown()
            thread.join()


class TestRepeats:
    @pytest.mark.parametrize("trouble", [HANG_UP, (503, error("SlowDown")), (429, b""), (500, b"<html>")])
    def test_a_plain_request_is_repeated(self, trouble):
        with scripted(trouble, trouble, (200, b"body")) as bucket:
            assert bucket.get("x") == b"body"

    def test_not_for_ever(self):
        with scripted(*[(503, error("SlowDown"))] * 5) as bucket, pytest.raises(StoreUnreachable, match="SlowDown"):
            bucket.put("x", b"")

    @pytest.mark.parametrize("trouble", [HANG_UP, (503, error("SlowDown")), (500, error("InternalError"))])
    def test_a_conditional_put_is_not(self, trouble):
        with scripted(trouble) as bucket, pytest.raises(StoreUnreachable):
            bucket.put_new("x", b"")

    def test_but_after_a_conflict_that_wrote_nothing_it_is(self):
        with scripted((409, error("ConditionalRequestConflict")), (412, error("PreconditionFailed"))) as bucket:
            assert not bucket.put_new("x", b"")
            assert [headers["If-None-Match"] for _, _, headers, _ in bucket.requests] == ["*", "*"]
        with scripted(*[(409, error("ConditionalRequestConflict"))] * 5) as bucket, pytest.raises(StoreUnreachable):
            bucket.put_new("x", b"")

    def test_a_body_that_ends_early_is_read_again(self):
        with scripted((200, b"bo", {"Content-Length": "4", "Connection": "close"}), (200, b"body")) as bucket:
            assert bucket.get("x") == b"body"


class TestComplete:
    @pytest.mark.parametrize(
        ("answer", "meaning"),
        [
            ((200, b"<CompleteMultipartUploadResult/>"), Completion.COMPLETED),
            ((200, b" \n<CompleteMultipartUploadResult xmlns='http://s3'/>"), Completion.COMPLETED),
            ((200, error("InternalError")), Completion.UNCLEAR),
            ((200, error("InvalidPart")), Completion.INVALID_PART),
            ((200, error("NoSuchUpload")), Completion.NO_SUCH_UPLOAD),
            ((200, error("PreconditionFailed")), Completion.KEY_EXISTS),
            ((200, b""), Completion.UNCLEAR),
            ((200, b"<html>"), Completion.UNCLEAR),
            ((400, error("InvalidPartOrder")), Completion.INVALID_PART),
            ((400, error("EntityTooSmall")), Completion.INVALID_PART),
            ((404, error("NoSuchUpload")), Completion.NO_SUCH_UPLOAD),
            ((409, error("ConditionalRequestConflict")), Completion.UNCLEAR),
            ((412, b""), Completion.KEY_EXISTS),
            ((500, error("InternalError")), Completion.UNCLEAR),
            ((503, b""), Completion.UNCLEAR),
            (HANG_UP, Completion.UNCLEAR),
        ],
    )
    def test_one_request_and_what_its_answer_means(self, answer, meaning):
        with scripted(answer) as bucket:
            assert bucket.complete_upload("x", "id", {2: "b", 1: "a"}) is meaning
            [(method, path, headers, body)] = bucket.requests
        assert (method, headers["If-None-Match"]) == ("POST", "*")
        assert parse_qs(urlsplit(path).query)["uploadId"] == ["id"]
        assert body == (
            b"<CompleteMultipartUpload><Part><PartNumber>1</PartNumber><ETag>&quot;a&quot;</ETag></Part>"
            b"<Part><PartNumber>2</PartNumber><ETag>&quot;b&quot;</ETag></Part></CompleteMultipartUpload>"
        )

    @pytest.mark.parametrize("code", ["NoSuchBucket", "AccessDenied"])
    def test_a_clear_no_is_refused(self, code):
        with scripted((404, error(code))) as bucket, pytest.raises(StoreRefused) as refused:
            bucket.complete_upload("x", "id", {1: "a"})
        assert refused.value.code == code


class TestHostileAnswers:
    """A store, or what stands in its place, is not trusted."""

    @pytest.mark.parametrize(
        "body",
        [
            b"", b"<html><body>secret</body></html>", b"{}", b"\xff\xfe", b"<ListBucketResult>",
            b'<!DOCTYPE x [<!ENTITY a "aa">]><ListBucketResult><Contents><Key>&a;</Key></Contents></ListBucketResult>',
            '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE x [<!ENTITY a "b">]><ListBucketResult/>'.encode("utf-16"),
            b"<ListBucketResult><Contents><Key>x</Key><Size>-1</Size></Contents></ListBucketResult>",
            b"<ListBucketResult><Contents><Size>1</Size><LastModified>?</LastModified></Contents></ListBucketResult>",
            b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        ],
    )  # fmt: skip
    def test_what_is_no_listing_is_refused(self, body):
        with (
            scripted((200, body)) as bucket,
            pytest.raises(StoreRefused, match="check that the endpoint is an S3") as no,
        ):
            bucket.list("")
        assert "secret" not in str(no.value)

    def test_a_listing_that_goes_round_in_circles_ends(self):
        more = b"<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken>"
        page = b"<ListBucketResult>" + more + b"</ListBucketResult>"
        with scripted((200, page), (200, page)) as bucket, pytest.raises(StoreRefused):
            bucket.list("")

    @pytest.mark.parametrize("code", ["<script>", "a b", "x" * 65, "\x1b[2J", ""])
    def test_a_code_that_looks_like_none_is_not_shown(self, code):
        body = f"<Error><Code><![CDATA[{code}]]></Code></Error>".encode()
        with scripted((403, body)) as bucket, pytest.raises(StoreRefused, match=r"\(HTTP 403\)") as refused:
            bucket.get("x")
        assert refused.value.code == "HTTP403"

    def test_more_bytes_than_asked_for_are_not_read(self):
        flood = (206, bytes(1 << 20), {"Content-Range": "bytes 0-9/10"})
        with scripted(flood) as bucket, pytest.raises(StoreRefused, match="more than") as refused:
            bucket.read("x", 0, 10, "etag")
        assert refused.value.code == "TooLong"

    @pytest.mark.parametrize(
        "answer",
        [
            (200, b"0123456789"), (206, b"0123456789"), (206, b"0123456789", {"Content-Range": "bytes 1-10/20"}),
            (206, b"0123456789", {"Content-Range": "items 0-9/20"}),
            (206, b"0123456789x", {"Content-Range": "bytes 0-10/20"}),
        ],
    )  # fmt: skip
    def test_a_read_wants_exactly_its_range(self, answer):
        with scripted(answer) as bucket, pytest.raises(StoreRefused) as refused:
            bucket.read("x", 0, 10, "etag")
        assert refused.value.code == "MalformedAnswer"

    def test_a_redirect_is_not_followed_but_its_region_is_named(self):
        moved = (
            301,
            error("PermanentRedirect"),
            {"Location": "http://127.0.0.1:1/", "x-amz-bucket-region": "eu-west-1"},
        )
        with scripted(moved) as bucket, pytest.raises(StoreRefused, match=r"another region \(eu-west-1\)"):
            bucket.get("x")

    def test_a_404_of_something_that_is_no_store_is_no_missing_object(self):
        with scripted((404, b"<html>")) as bucket, pytest.raises(StoreRefused):
            bucket.get("x")
        with scripted((404, error("NoSuchKey"))) as bucket, pytest.raises(ObjectGone):
            bucket.read("x", 0, 1, "etag")

    def test_what_was_not_removed_is_told(self):
        failed = (
            b"<DeleteResult><Error><Key>x</Key><Code>AccessDenied</Code><Message>m</Message></Error></DeleteResult>"
        )
        with scripted((200, failed)) as bucket, pytest.raises(StoreRefused, match="remove") as refused:
            bucket.delete(["x"])
        assert refused.value.code == "AccessDenied"


def test_a_listing_is_joined_from_its_pages_and_sorted_by_bytes():
    def page(keys, more):
        rows = "".join(
            f'<Contents><Key>{key}</Key><Size>1</Size><ETag>"e"</ETag><LastModified>2026-01-02T03:04:05.999Z</LastModified>'
            "</Contents>"
            for key in keys
        )
        after = "<IsTruncated>true</IsTruncated><NextContinuationToken>a+b/</NextContinuationToken>" * more
        return (200, f"<ListBucketResult xmlns='http://s3'>{rows}{after}</ListBucketResult>".encode())

    with scripted(page(["a/b", "%C3%A4+x"], True), page(["a-b", "a%2Bb"], False)) as bucket:
        infos = list(bucket.list("p&q"))
        first, second = (parse_qs(urlsplit(path).query) for _, path, _, _ in bucket.requests)
    assert [info.key for info in infos] == ["a+b", "a-b", "a/b", "ä x"]
    assert {(info.etag, info.last_modified) for info in infos} == {("e", "2026-01-02T03:04:05Z")}
    assert (first["prefix"], "continuation-token" in first) == (["p&q"], False)
    assert second["continuation-token"] == ["a+b/"]


class TestClocks:
    NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)

    @pytest.mark.parametrize(
        ("theirs", "offset"),
        [
            (NOW + timedelta(seconds=59), timedelta(0)),
            (NOW - timedelta(seconds=59), timedelta(0)),
            (NOW + timedelta(seconds=90), timedelta(seconds=80)),
            (NOW - DAY, -DAY - timedelta(seconds=10)),
        ],
    )
    def test_a_minute_is_no_difference(self, theirs, offset):
        """The answer took 10 s to come: no more than that is put down to the clocks."""
        header = format_datetime(theirs, usegmt=True)
        assert clock_offset(header, self.NOW, self.NOW + timedelta(seconds=10)) == offset

    @pytest.mark.parametrize("header", ["", "yesterday", "Mon, 99 Foo 2026 00:00:00 GMT"])
    def test_a_date_that_is_none_changes_nothing(self, header):
        assert clock_offset(header, self.NOW, self.NOW) == timedelta(0)

    def test_what_was_refused_for_our_clock_is_signed_anew_by_theirs(self):
        theirs = datetime.now(UTC) + DAY
        date = {"Date": format_datetime(theirs, usegmt=True)}
        with scripted((403, error("RequestTimeTooSkewed"), date), (412, b"", date)) as bucket:
            assert not bucket.put_new("x", b"")
            url = bucket.presign_get("x", None, timedelta(minutes=1))
            late = bucket.requests[1][1]
        for signed in (late, url):
            [moment] = parse_qs(urlsplit(signed).query)["X-Amz-Date"]
            assert abs(datetime.strptime(moment, "%Y%m%dT%H%M%S%z") - theirs) < timedelta(minutes=2)

    def test_a_403_with_agreeing_clocks_is_final(self):
        with scripted((403, error("AccessDenied"))) as bucket, pytest.raises(StoreRefused, match="grant it"):
            bucket.get("x")


class TestConnect:
    def test_aws_has_the_bucket_in_the_host(self):
        bucket = S3Bucket.connect(None, "bucket", "eu-west-1", static("KEY", "SECRET", "TOKEN"))
        url = bucket.presign_part("a b", "id", 7, DAY)

        assert bucket.origin == "https://bucket.s3.eu-west-1.amazonaws.com"
        assert url.startswith(f"{bucket.origin}/a%20b?")
        query = parse_qs(urlsplit(url).query)
        assert query["X-Amz-Security-Token"] == ["TOKEN"]
        assert (query["partNumber"], query["uploadId"], query["X-Amz-Expires"]) == (["7"], ["id"], ["86400"])

    def test_others_have_it_in_the_path_and_no_default_port(self):
        bucket = S3Bucket.connect("https://minio.example:443/", "bucket", "us-east-1", static("KEY", "SECRET"))

        assert bucket.origin == "https://minio.example"
        assert bucket.presign_get("x", "v1", DAY).startswith("https://minio.example/bucket/x?versionId=v1&")

    @pytest.mark.parametrize(
        "endpoint",
        ["minio:9000", "ftp://minio", "http://", "http://minio/path", "http://key:secret@minio", "http://minio?x=1", "http://minio:x"],
    )  # fmt: skip
    def test_an_endpoint_that_is_none_is_refused_without_keys_that_may_be_in_it(self, endpoint):
        with pytest.raises(StoreRefused, match="endpoint") as refused:
            S3Bucket.connect(endpoint, "bucket", "us-east-1", static("KEY", "SECRET"))
        assert "secret" not in str(refused.value)

    def test_bucket_region_and_certificate_are_checked(self):
        keys = static("KEY", "SECRET")
        with pytest.raises(StoreRefused, match="bucket 'No Bucket'"):
            S3Bucket.connect("http://minio", "No Bucket", "us-east-1", keys)
        with pytest.raises(StoreRefused, match="region 'us east'"):
            S3Bucket.connect("http://minio", "bucket", "us east", keys)
        with pytest.raises(StoreRefused, match="not PEM"):
            S3Bucket.connect("https://minio", "bucket", "us-east-1", keys, "no certificate")

    @pytest.mark.parametrize("key", ["a/../b", "./a", "..", " "])
    def test_keys_that_no_two_servers_read_alike_are_refused(self, key):
        bucket = S3Bucket.connect("http://minio", "bucket", "us-east-1", static("KEY", "SECRET"))
        with pytest.raises(StoreRefused, match=r"key .* cannot be used"):
            bucket.presign_get(key, None, DAY)

    def test_lifetimes_stay_within_what_s3_allows(self):
        bucket = S3Bucket.connect("http://minio", "bucket", "us-east-1", static("KEY", "SECRET"))
        for lifetime, seconds in [(timedelta(0), "1"), (timedelta(days=30), "604800")]:
            [signed] = parse_qs(urlsplit(bucket.presign_put("x", lifetime)).query)["X-Amz-Expires"]
            assert signed == seconds


def test_buckets_share_the_certificates_that_they_trust_and_plain_http_needs_none(monkeypatch):
    """They take a megabyte and 30 ms each time, and an operator has many buckets."""
    loaded = []

    def load():
        loaded.append(1)
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    monkeypatch.setattr(ssl, "create_default_context", load)
    s3_transport._trust.cache_clear()
    for endpoint, times in (("http://store.test", 0), ("https://store.test", 1), ("https://other.test", 1)):
        S3Bucket.connect(endpoint, "bucket", "us-east-1", static("a", "s"))
        assert len(loaded) == times
    s3_transport._trust.cache_clear()
