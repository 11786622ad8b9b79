"""One suite for every store: what the protocol relies on. SeaweedFS is real; the memory store must not differ.

Set S3_CONTRACT_ENDPOINT and the AWS keys (and S3_CONTRACT_BUCKET, else contract) to hold another store to it as well.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import urllib3
from memory_store import MemoryStore
from minio import Minio
from minio.versioningconfig import ENABLED, VersioningConfig

from gradsharding.credentials import ambient, static
from gradsharding.errors import ObjectGone, StoreRefused, StoreUnreachable
from gradsharding.probe import probe_conditional_put
from gradsharding.s3 import S3Bucket
from gradsharding.s3_transport import Patience
from gradsharding.store import Completion

SEAWEEDFS = pytest.mark.xdist_group("seaweedfs")
ENDPOINT = os.environ.get("S3_CONTRACT_ENDPOINT")
LIFETIME = timedelta(minutes=5)
MIN_PART = 5 << 20

ODD_KEYS = [
    "a b", "a+b", "a%2Bb", "a%b", "ümläut €😀", "a&b<c>'\"", "~t*(!)@:,;=$", "q?x=1#f", "tab\there", " blank ends ",
    "back.slash", "a/b/c", "a-b", "a",
]  # fmt: skip


@dataclass
class Store:
    """A store under test: its buckets, and what only a client does."""

    kind: str
    connect: Any
    name: str
    minio: Any = None

    def bucket(self, name=None, **options):
        return self.connect(name or self.name, **options)

    def upload(self, key, body, metadata):
        if self.minio is None:
            self.bucket().put(key, body, metadata)
        else:
            self.minio.put_object(self.name, key, io.BytesIO(body), len(body), metadata=metadata)

    def versioned_bucket(self):
        if self.minio is None:
            return self.bucket()  # all of the memory store's are
        name = f"versioned-{uuid.uuid4().hex[:8]}"
        self.minio.make_bucket(name)
        self.minio.set_bucket_versioning(name, VersioningConfig(ENABLED))
        return self.bucket(name)


def s3_store(kind, endpoint, credentials, name):
    keys = credentials.retrieve()
    secure = endpoint.startswith("https://")
    host = endpoint.split("//")[1]
    minio = Minio(host, keys.access_key, keys.secret_key, keys.session_token, secure=secure, region="us-east-1")

    def connect(bucket, **options):
        return S3Bucket.connect(endpoint, bucket, "us-east-1", credentials, **options)

    return Store(kind, connect, name, minio)


KINDS = ["memory", "memory, SeaweedFS's dialect", pytest.param("seaweedfs", marks=SEAWEEDFS)]
if ENDPOINT:
    KINDS.append("external")


@pytest.fixture(scope="module", params=KINDS)
def store(request):
    if request.param == "seaweedfs":
        server = request.getfixturevalue("seaweedfs")
        server.create_bucket("contract")
        yield s3_store("seaweedfs", server.endpoint, static(server.access_key, server.secret_key), "contract")
    elif request.param == "external":
        external = s3_store("external", ENDPOINT, ambient(), os.environ.get("S3_CONTRACT_BUCKET", "contract"))
        if not external.minio.bucket_exists(external.name):
            external.minio.make_bucket(external.name)
        yield external
    else:
        with MemoryStore(keep_both_parts=request.param != "memory", versioned=True) as memory:
            memory.bucket("contract")

            def connect(name, **_):
                return memory.bucket(name, create=False)

            yield Store(request.param, connect, "contract")


@pytest.fixture
def bucket(store):
    return store.bucket()


@pytest.fixture
def prefix():
    """Keys of this test alone."""
    return f"{uuid.uuid4().hex}/"


@pytest.fixture(scope="module")
def web():
    """A client that knows no S3, as a reducer."""
    with urllib3.PoolManager(retries=False, timeout=30) as pool:
        yield pool


def md5(body):
    return hashlib.md5(body).hexdigest()


def content_md5(body):
    return {"Content-MD5": base64.b64encode(hashlib.md5(body).digest()).decode()}


def put_part(web, bucket, key, upload, number, body, **options):
    return web.request("PUT", bucket.presign_part(key, upload, number, LIFETIME), body=body, **options)


def begin(web, bucket, key, *bodies):
    """An upload with these parts; its id and ETags."""
    upload = bucket.create_upload(key)
    etags = {}
    for number, body in enumerate(bodies, 1):
        answer = put_part(web, bucket, key, upload, number, body, headers=content_md5(body))
        assert answer.status == 200
        etags[number] = answer.headers["ETag"].strip('"')
    return upload, etags


class TestObjects:
    def test_what_was_put_is_there_whole(self, bucket, prefix):
        bucket.put(f"{prefix}x", b"body")
        bucket.put(f"{prefix}empty", b"")

        assert bucket.get(f"{prefix}x") == b"body"
        assert bucket.get(f"{prefix}empty") == b""
        assert bucket.get(f"{prefix}none") is None

    def test_a_listing_and_a_look_say_the_same(self, bucket, prefix):
        bucket.put(f"{prefix}x", b"body")

        [listed] = bucket.list(prefix)
        seen = bucket.stat(f"{prefix}x")

        assert (listed.key, listed.size, listed.etag) == (f"{prefix}x", 4, md5(b"body"))
        assert (seen.key, seen.size, seen.etag) == (listed.key, listed.size, listed.etag)
        assert seen.last_modified == listed.last_modified
        assert time.strptime(seen.last_modified, "%Y-%m-%dT%H:%M:%SZ")
        assert bucket.stat(f"{prefix}none") is None

    def test_metadata_comes_with_lower_case_names(self, store, bucket, prefix):
        store.upload(f"{prefix}x", b"body", {"num-examples": "42"})

        assert bucket.stat(f"{prefix}x").metadata == {"num-examples": "42"}

    def test_another_body_is_another_etag(self, bucket, prefix):
        bucket.put(f"{prefix}x", b"one")
        before = bucket.stat(f"{prefix}x").etag
        bucket.put(f"{prefix}x", b"two")

        assert bucket.stat(f"{prefix}x").etag != before

    @pytest.mark.parametrize("key", ODD_KEYS)
    def test_odd_keys_survive(self, bucket, prefix, web, key):
        key = prefix + key
        bucket.put(key, b"one")
        assert [info.key for info in bucket.list(prefix)] == [key]
        assert web.request("PUT", bucket.presign_put(key, LIFETIME), body=b"two").status == 200
        assert bucket.get(key) == b"two"
        assert bucket.stat(key).key == key
        assert web.request("GET", bucket.presign_get(key, None, LIFETIME)).data == b"two"
        upload, etags = begin(web, bucket, key, b"part")
        assert bucket.list_uploads(key) == [upload]
        assert bucket.list_parts(key, upload) == {1: [etags[1]]}
        bucket.abort_upload(key, upload)
        bucket.delete([key])
        assert list(bucket.list(prefix)) == []

    def test_keys_are_listed_in_the_order_of_their_bytes_over_all_pages(self, store, prefix):
        bucket = store.bucket(page_size=3)
        # No key is a folder of another: MinIO stores such keys, and does not list them.
        keys = [prefix + key for key in ["a/b", "a-b", "a!", "a/c/d", "B", "b", "ä", "z/1", "z/2", "z.3", "😀", "￿"]]
        for key in keys:
            bucket.put(key, b"x")

        assert [info.key for info in bucket.list(prefix)] == sorted(keys, key=str.encode)
        assert [info.key for info in bucket.list(f"{prefix}z/")] == [f"{prefix}z/1", f"{prefix}z/2"]
        assert [info.key for info in bucket.list(f"{prefix}a")] == sorted(keys, key=str.encode)[1:5]

    def test_objects_are_removed_missing_ones_too(self, bucket, prefix):
        bucket.put(f"{prefix}a", b"x")
        bucket.put(f"{prefix}b", b"x")
        bucket.delete([f"{prefix}a", f"{prefix}none"])
        bucket.delete([])

        assert [info.key for info in bucket.list(prefix)] == [f"{prefix}b"]


class TestPinnedReads:
    def test_a_range_is_read_exactly(self, bucket, prefix):
        bucket.put(f"{prefix}x", bytes(range(100)))
        etag = bucket.stat(f"{prefix}x").etag

        assert bucket.read(f"{prefix}x", 0, 100, etag) == bytes(range(100))
        assert bucket.read(f"{prefix}x", 99, 1, etag) == b"c"
        assert bucket.read(f"{prefix}x", 5, 0, etag) == b""

    @pytest.mark.parametrize("start", [95, 100, 1000])
    def test_beyond_the_end_is_refused(self, bucket, prefix, start):
        bucket.put(f"{prefix}x", bytes(100))

        with pytest.raises(StoreRefused) as refused:
            bucket.read(f"{prefix}x", start, 10, bucket.stat(f"{prefix}x").etag)
        assert refused.value.code == "InvalidRange"

    def test_an_object_that_is_gone_or_another_is_not_read(self, bucket, prefix):
        bucket.put(f"{prefix}x", b"one")
        etag = bucket.stat(f"{prefix}x").etag
        bucket.put(f"{prefix}x", b"two")

        with pytest.raises(ObjectGone) as other:
            bucket.read(f"{prefix}x", 0, 3, etag)
        with pytest.raises(ObjectGone) as gone:
            bucket.read(f"{prefix}none", 0, 3, etag)
        assert (other.value.status, gone.value.status) == (412, 404)


class TestConditionalPuts:
    def test_the_first_wins_and_stays(self, bucket, prefix):
        assert bucket.put_new(f"{prefix}x", b"first")
        assert not bucket.put_new(f"{prefix}x", b"second")
        assert bucket.get(f"{prefix}x") == b"first"

    def test_of_eight_at_once_exactly_one_wins(self, bucket, prefix):
        for attempt in range(3):
            with ThreadPoolExecutor(8) as pool:
                bodies = [b"%d" % writer for writer in range(8)]
                wins = list(pool.map(lambda body, key=f"{prefix}{attempt}": bucket.put_new(key, body), bodies))
            assert wins.count(True) == 1
            assert bucket.get(f"{prefix}{attempt}") == bodies[wins.index(True)]

    def test_the_probe_accepts_it_and_leaves_nothing(self, bucket, prefix):
        probe_conditional_put(bucket, prefix)

        assert list(bucket.list(prefix)) == []


class TestPresignedUrls:
    def test_a_range_of_the_pinned_object(self, bucket, prefix, web):
        bucket.put(f"{prefix}x", b"0123456789")
        url = bucket.presign_get(f"{prefix}x", None, LIFETIME)
        assert url.startswith(f"{bucket.origin}/")
        pin = {"If-Match": f'"{md5(b"0123456789")}"'}

        answer = web.request("GET", url, headers=pin | {"Range": "bytes=2-4"})
        assert (answer.status, answer.data, answer.headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")
        shortened = web.request("GET", url, headers=pin | {"Range": "bytes=8-20"})
        assert (shortened.status, shortened.data, shortened.headers["Content-Range"]) == (206, b"89", "bytes 8-9/10")
        assert web.request("GET", url, headers=pin | {"Range": "bytes=10-20"}).status == 416
        assert web.request("GET", url, headers={"If-Match": f'"{md5(b"other")}"'}).status == 412
        bucket.delete([f"{prefix}x"])
        assert web.request("GET", url, headers=pin).status == 404

    def test_its_time_ends(self, bucket, prefix, web):
        bucket.put(f"{prefix}x", b"x")
        url = bucket.presign_get(f"{prefix}x", None, timedelta(seconds=1))

        deadline = time.monotonic() + 30
        while (status := web.request("GET", url).status) == 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert status == 403

    def test_it_opens_one_door(self, bucket, prefix, web):
        bucket.put(f"{prefix}x", b"x")
        bucket.put(f"{prefix}y", b"y")
        upload, _ = begin(web, bucket, f"{prefix}z")
        get = bucket.presign_get(f"{prefix}x", None, LIFETIME)
        part = bucket.presign_part(f"{prefix}z", upload, 1, LIFETIME)

        assert web.request("PUT", get, body=b"other").status == 403
        assert web.request("GET", bucket.presign_put(f"{prefix}x", LIFETIME)).status == 403
        assert web.request("GET", get.replace(f"{prefix}x", f"{prefix}y")).status == 403
        changed = web.request("PUT", part.replace("partNumber=1", "partNumber=2") + "0" * ("claims" in part), body=b"x")
        assert changed.status == 403
        assert bucket.get(f"{prefix}x") == b"x"
        assert not bucket.list_parts(f"{prefix}z", upload)
        bucket.abort_upload(f"{prefix}z", upload)

    def test_an_older_version_can_be_read(self, store, prefix, web):
        bucket = store.versioned_bucket()
        bucket.put(f"{prefix}x", b"one")
        seen = bucket.stat(f"{prefix}x")
        bucket.put(f"{prefix}x", b"two")

        old = web.request("GET", bucket.presign_get(f"{prefix}x", seen.version_id, LIFETIME))
        new = web.request("GET", bucket.presign_get(f"{prefix}x", None, LIFETIME))
        assert (old.data, new.data) == (b"one", b"two")
        assert old.headers["ETag"].strip('"') == seen.etag


class TestUploads:
    def test_parts_are_joined(self, bucket, prefix, web):
        first, second = os.urandom(MIN_PART), b"the last one may be small"
        upload, etags = begin(web, bucket, f"{prefix}x", first, second)

        assert etags == {1: md5(first), 2: md5(second)}
        assert bucket.list_parts(f"{prefix}x", upload) == {1: [etags[1]], 2: [etags[2]]}
        assert bucket.stat(f"{prefix}x") is None
        assert bucket.complete_upload(f"{prefix}x", upload, etags) is Completion.COMPLETED
        assert bucket.get(f"{prefix}x") == first + second
        assert bucket.stat(f"{prefix}x").size == len(first) + len(second)
        assert bucket.list_uploads(f"{prefix}x") == []

    def test_a_part_that_was_damaged_on_its_way_is_refused(self, bucket, prefix, web):
        upload, _ = begin(web, bucket, f"{prefix}x")

        answer = put_part(web, bucket, f"{prefix}x", upload, 1, b"damaged", headers=content_md5(b"whole"))
        assert (answer.status, b"<Code>BadDigest</Code>" in answer.data) == (400, True)
        assert not bucket.list_parts(f"{prefix}x", upload)
        bucket.abort_upload(f"{prefix}x", upload)

    @pytest.mark.parametrize("etags", [{1: md5(b"other")}, {2: md5(b"one")}], ids=["another ETag", "missing part"])
    def test_an_unknown_part_is_told(self, bucket, prefix, web, etags):
        upload, _ = begin(web, bucket, f"{prefix}x", b"one")

        assert bucket.complete_upload(f"{prefix}x", upload, etags) is Completion.INVALID_PART
        assert bucket.complete_upload(f"{prefix}x", upload, {1: md5(b"one")}) is Completion.COMPLETED

    def test_a_small_part_in_the_middle_is_told(self, bucket, prefix, web):
        upload, etags = begin(web, bucket, f"{prefix}x", b"small", b"last")

        assert bucket.complete_upload(f"{prefix}x", upload, etags) is Completion.INVALID_PART
        bucket.abort_upload(f"{prefix}x", upload)

    def test_the_etag_decides_between_two_bodies_of_a_part(self, bucket, prefix, web):
        """Some stores keep the last body only, others both: neither may give the older ETag the newer bytes."""
        upload, etags = begin(web, bucket, f"{prefix}x", b"older")
        assert put_part(web, bucket, f"{prefix}x", upload, 1, b"newer").status == 200

        assert md5(b"newer") in bucket.list_parts(f"{prefix}x", upload)[1]
        completion = bucket.complete_upload(f"{prefix}x", upload, etags)
        expected = {Completion.INVALID_PART: None, Completion.COMPLETED: b"older"}
        assert bucket.get(f"{prefix}x") == expected[completion]
        bucket.abort_upload(f"{prefix}x", upload)

    def test_the_same_part_twice_is_one_part(self, bucket, prefix, web):
        upload, etags = begin(web, bucket, f"{prefix}x", b"same")
        assert put_part(web, bucket, f"{prefix}x", upload, 1, b"same").status == 200

        assert bucket.complete_upload(f"{prefix}x", upload, etags) is Completion.COMPLETED
        assert bucket.get(f"{prefix}x") == b"same"

    def test_a_key_that_exists_is_kept(self, bucket, prefix, web):
        upload, etags = begin(web, bucket, f"{prefix}x", b"ours")
        bucket.put(f"{prefix}x", b"foreign")

        assert bucket.complete_upload(f"{prefix}x", upload, etags) is Completion.KEY_EXISTS
        assert bucket.get(f"{prefix}x") == b"foreign"
        assert bucket.list_uploads(f"{prefix}x") == [upload]
        bucket.abort_upload(f"{prefix}x", upload)

    def test_to_complete_twice_does_no_harm(self, bucket, prefix, web):
        upload, etags = begin(web, bucket, f"{prefix}x", b"ours")
        assert bucket.complete_upload(f"{prefix}x", upload, etags) is Completion.COMPLETED

        again = bucket.complete_upload(f"{prefix}x", upload, etags)
        assert again in (Completion.KEY_EXISTS, Completion.NO_SUCH_UPLOAD)
        assert bucket.get(f"{prefix}x") == b"ours"
        assert put_part(web, bucket, f"{prefix}x", upload, 1, b"late").status == 404

    def test_nothing_can_be_done_with_an_aborted_upload(self, bucket, prefix, web):
        upload, etags = begin(web, bucket, f"{prefix}x", b"part")
        assert bucket.abort_upload(f"{prefix}x", upload)

        late = put_part(web, bucket, f"{prefix}x", upload, 1, b"late")
        assert (late.status, b"<Code>NoSuchUpload</Code>" in late.data) == (404, True)
        assert bucket.complete_upload(f"{prefix}x", upload, etags) is Completion.NO_SUCH_UPLOAD
        assert bucket.list_parts(f"{prefix}x", upload) is None
        assert bucket.list_uploads(f"{prefix}x") == []
        assert bucket.stat(f"{prefix}x") is None
        bucket.abort_upload(f"{prefix}x", upload)  # the answer is the store's own: True on SeaweedFS, False elsewhere

    def test_uploads_are_those_of_exactly_this_key(self, bucket, prefix):
        keys = [f"{prefix}x", f"{prefix}x.y", f"{prefix}x/y", prefix + "w"]
        uploads = {key: bucket.create_upload(key) for key in keys}
        second = bucket.create_upload(f"{prefix}x")

        assert bucket.list_uploads(f"{prefix}x") == sorted([uploads[f"{prefix}x"], second])
        assert bucket.list_uploads(f"{prefix}x.y") == [uploads[f"{prefix}x.y"]]
        assert bucket.list_uploads(f"{prefix}none") == []
        uploads |= {f"{prefix}x": second}
        for key in keys:
            for upload in bucket.list_uploads(key):
                bucket.abort_upload(key, upload)

    def test_many_parts_are_all_listed(self, store, bucket, prefix, web):
        upload = bucket.create_upload(f"{prefix}x")
        with ThreadPoolExecutor(4) as pool:
            statuses = pool.map(lambda n: put_part(web, bucket, f"{prefix}x", upload, n, b"x").status, range(1, 41))
            assert set(statuses) == {200}

        assert bucket.list_parts(f"{prefix}x", upload) == {number: [md5(b"x")] for number in range(1, 41)}
        bucket.abort_upload(f"{prefix}x", upload)


OPERATIONS = {
    "list": lambda bucket: list(bucket.list("x")),
    "stat": lambda bucket: bucket.stat("x"),
    "get": lambda bucket: bucket.get("x"),
    "read": lambda bucket: bucket.read("x", 0, 1, md5(b"")),
    "put": lambda bucket: bucket.put("x", b""),
    "put_new": lambda bucket: bucket.put_new("x", b""),
    "delete": lambda bucket: bucket.delete(["x"]),
    "create_upload": lambda bucket: bucket.create_upload("x"),
    "complete_upload": lambda bucket: bucket.complete_upload("x", "0" * 32, {1: md5(b"")}),
    "list_parts": lambda bucket: bucket.list_parts("x", "0" * 32),
    "list_uploads": lambda bucket: bucket.list_uploads("x"),
    "abort_upload": lambda bucket: bucket.abort_upload("x", "0" * 32),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_missing_bucket_is_refused(store, operation):
    if (store.kind, operation) == ("seaweedfs", "read"):
        pytest.skip("to a pinned GET, SeaweedFS says NoSuchKey")
    with pytest.raises(StoreRefused, match=r"no-such-bucket.*create it") as refused:
        OPERATIONS[operation](store.bucket("no-such-bucket"))
    assert refused.value.code == "NoSuchBucket"


@SEAWEEDFS
class TestRefusals:
    """What a real server says to wrong keys, in our words, and without theirs."""

    @pytest.mark.parametrize("operation", OPERATIONS)
    @pytest.mark.parametrize("wrong", ["access key", "secret key"])
    def test_wrong_keys(self, seaweedfs, operation, wrong):
        secret = "this-must-never-be-shown"
        keys = {"access key": (secret, "x" * 40), "secret key": (seaweedfs.access_key, secret)}[wrong]
        bucket = S3Bucket.connect(seaweedfs.endpoint, "contract", "us-east-1", static(*keys))

        with pytest.raises(StoreRefused) as refused:
            OPERATIONS[operation](bucket)
        assert refused.value.code == {"access key": "InvalidAccessKeyId", "secret key": "SignatureDoesNotMatch"}[wrong]
        message = str(refused.value)
        assert seaweedfs.endpoint in message
        assert "'contract'" in message
        assert f"check the {wrong}" in message
        assert secret not in message
        assert "Signature=" not in message


@pytest.fixture
def free_port():
    """A port on which nobody listens."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        yield taken.getsockname()[1]


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "complete_upload"])
def test_a_dead_endpoint_is_told(free_port, operation):
    endpoint = f"http://127.0.0.1:{free_port}"
    bucket = S3Bucket.connect(endpoint, "contract", "us-east-1", static("KEY", "SECRET"), patience=Patience(pause=0.01))

    with pytest.raises(StoreUnreachable) as unreachable:
        OPERATIONS[operation](bucket)
    message = str(unreachable.value)
    assert endpoint in message
    assert "Signature" not in message
    assert "KEY" not in message


def test_patience_with_a_dead_endpoint_ends_soon():
    waits = [Patience().longest_pause(failures) for failures in range(1, Patience().tries)]

    assert sum(waits) < 10
