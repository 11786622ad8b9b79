"""One bucket of an S3 store: which request each operation is, and what its answer means."""

from __future__ import annotations

import base64
import hashlib
import re
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, TypeVar

from gradsharding import s3_xml
from gradsharding.errors import ObjectGone, StoreRefused, StoreUnreachable
from gradsharding.s3_refusal import no_answer, refusal
from gradsharding.s3_transport import BUSY, Answer, Patience, Transport
from gradsharding.store import Completion, ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from minio.credentials.providers import Provider

T = TypeVar("T")

_MAX_SMALL_OBJECT = 64 << 20
_MAX_DELETE = 1000
_PATIENCE = Patience()

_COMPLETIONS = {
    "PreconditionFailed": Completion.KEY_EXISTS,
    "NoSuchUpload": Completion.NO_SUCH_UPLOAD,
    "InvalidPart": Completion.INVALID_PART,
    "InvalidPartOrder": Completion.INVALID_PART,
    "EntityTooSmall": Completion.INVALID_PART,
}


class S3Bucket:
    """The Bucket protocol on S3. One instance serves many threads."""

    def __init__(self, transport: Transport, page_size: int = 1000) -> None:
        self.name = transport.bucket
        self.origin = transport.origin
        self._transport = transport
        self._page_size = page_size

    @classmethod
    def connect(
        cls,
        endpoint: str | None,
        bucket: str,
        region: str,
        credentials: Provider,
        ca_pem: str | None = None,
        *,
        patience: Patience = _PATIENCE,
        page_size: int = 1000,
    ) -> S3Bucket:
        """A bucket at ``endpoint`` (``http[s]://host[:port]``; None: AWS S3 of the region). Asks nobody yet.

        ``ca_pem`` are certificates to trust beside the system's; ``page_size`` is how many keys one request lists.
        Raises StoreRefused when endpoint, bucket name, region or certificates cannot be right.
        """
        return cls(Transport(endpoint, bucket, region, credentials, ca_pem, patience), page_size)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """All objects under a prefix, in bytewise key order.

        Sorted here: SeaweedFS lists folder by folder, ``a/b`` before ``a-b``.
        """
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url", "max-keys": str(self._page_size)}
        found = {info.key: info for info in self._pages("list objects", "", query, s3_xml.objects_page)}
        return iter(sorted(found.values(), key=lambda info: info.key.encode()))

    def stat(self, key: str) -> ObjectInfo | None:
        """Size, ETag, version and metadata; None when there is no such object."""
        action = f"look at {key!r}"
        answer = self._transport.ask(action, "HEAD", key)
        if answer.status == 200:
            return self._understand(answer, action, lambda _: _described(key, answer.headers))
        # An answer to HEAD has no body, hence no error code: a GET of one byte has.
        answer = self._transport.ask(action, "GET", key, headers={"Range": "bytes=0-0"}, limit=1 << 16)
        if answer.no_such_key:
            return None
        if answer.status in (200, 206, 416):
            raise no_answer(self.origin, self.name, action, "the object appeared meanwhile")
        raise self._refusal(answer, action)

    def read(self, key: str, start: int, length: int, etag: str) -> bytes:
        """Exactly these bytes of the object with this ETag. Raises ObjectGone, or StoreRefused beyond its end."""
        if length == 0:
            return b""
        action = f"read {key!r}"
        pin = {"Range": f"bytes={start}-{start + length - 1}", "If-Match": f'"{etag}"'}
        answer = self._transport.ask(action, "GET", key, headers=pin, limit=max(length, 1 << 16))
        if answer.status == 412:
            raise ObjectGone(f"The object {key!r} in bucket {self.name!r} is another one now: it was overwritten.", 412)
        if answer.no_such_key:
            raise ObjectGone(f"The object {key!r} in bucket {self.name!r} is gone: it was removed.", 404)
        if answer.status != 206:
            raise self._refusal(answer, action)
        got = re.fullmatch(r"bytes ([0-9]+)-[0-9]+/(?:[0-9]+|\*)", answer.headers.get("Content-Range", ""))
        if got is None or int(got[1]) != start or len(answer.body) > length:
            raise refusal(self.origin, self.name, action, answer.status, "MalformedAnswer")
        if len(answer.body) < length:
            raise refusal(self.origin, self.name, action, answer.status, "InvalidRange")
        return answer.body

    def get(self, key: str) -> bytes | None:
        """A small object whole; None when there is none."""
        action = f"read {key!r}"
        answer = self._transport.ask(action, "GET", key, limit=_MAX_SMALL_OBJECT)
        return None if answer.no_such_key else self._agreed(answer, action).body

    def put(self, key: str, body: bytes) -> None:
        """Write a small object in one PUT."""
        action = f"write {key!r}"
        self._agreed(self._transport.ask(action, "PUT", key, headers=_content_md5(body), body=body), action)

    def put_new(self, key: str, body: bytes) -> bool:
        """Write only if the key is free. Never repeated after a lost answer."""
        action = f"write {key!r}"
        headers = {"If-None-Match": "*", **_content_md5(body)}
        for failures in range(1, self._transport.patience.tries + 1):
            answer = self._transport.ask(action, "PUT", key, headers=headers, body=body, once=True)
            if answer.status == 412:
                return False
            if answer.status != 409:
                self._agreed(answer, action)
                return True
            self._transport.patience.sleep(
                failures
            )  # another writer of this key was at it, and this request did nothing
        raise no_answer(self.origin, self.name, action, "others write the same key all the time")

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects; missing ones are fine."""
        for key in keys:
            if not s3_xml.fits_xml(key):
                action = f"remove {key!r}"
                self._agreed(self._transport.ask(action, "DELETE", key), action)
        rest = [key for key in keys if s3_xml.fits_xml(key)]
        action = "remove objects"
        for first in range(0, len(rest), _MAX_DELETE):
            body = s3_xml.delete_request(rest[first : first + _MAX_DELETE])
            answer = self._transport.ask(action, "POST", query={"delete": ""}, headers=_content_md5(body), body=body)
            failures = self._understand(self._agreed(answer, action), action, s3_xml.delete_failures)
            if failures:
                raise refusal(self.origin, self.name, action, answer.status, failures[0])

    def create_upload(self, key: str) -> str:
        """Begin a multipart upload; its id."""
        action = f"begin an upload of {key!r}"
        answer = self._transport.ask(action, "POST", key, {"uploads": ""})
        return self._understand(self._agreed(answer, action), action, s3_xml.upload_id)

    def complete_upload(self, key: str, upload: str, etags: Mapping[int, str]) -> Completion:
        """Join the parts, only if the key is free. One request, never repeated."""
        action = f"complete an upload of {key!r}"
        headers, body = {"If-None-Match": "*"}, s3_xml.complete_request(etags)
        try:
            answer = self._transport.ask(
                action, "POST", key, {"uploadId": upload}, headers=headers, body=body, once=True
            )
        except StoreUnreachable:
            return Completion.UNCLEAR
        if answer.status == 200 and s3_xml.is_completed(answer.body):
            return Completion.COMPLETED
        if answer.status == 412:
            return Completion.KEY_EXISTS
        if answer.code in _COMPLETIONS:
            return _COMPLETIONS[answer.code]
        if answer.status in (200, 409) or answer.status in BUSY:
            return Completion.UNCLEAR
        raise self._refusal(answer, action)

    def abort_upload(self, key: str, upload: str) -> bool:
        """Drop an upload and its parts. False: there was none, where the store tells (SeaweedFS does not)."""
        action = f"abort an upload of {key!r}"
        answer = self._transport.ask(action, "DELETE", key, {"uploadId": upload})
        if answer.code == "NoSuchUpload":
            return False
        self._agreed(answer, action)
        return True

    def list_parts(self, key: str, upload: str) -> Mapping[int, Sequence[str]] | None:
        """Part number → its ETags; None when the upload is gone."""
        parts: dict[int, list[str]] = {}
        try:
            for number, etag in self._pages(f"list the parts of {key!r}", key, {"uploadId": upload}, s3_xml.parts_page):
                parts.setdefault(number, []).append(etag)
        except StoreRefused as error:
            if error.code == "NoSuchUpload":
                return None
            raise
        return parts

    def list_uploads(self, key: str) -> Sequence[str]:
        """Ids of the uploads in progress of exactly this key."""
        found = self._pages("list uploads", "", {"uploads": "", "prefix": key}, s3_xml.uploads_page)
        return sorted(upload for name, upload in found if name == key)

    def presign_get(self, key: str, version_id: str | None, lifetime: timedelta) -> str:
        """A URL that reads one object."""
        return self._transport.sign("GET", key, {"versionId": version_id} if version_id else {}, lifetime)

    def presign_put(self, key: str, lifetime: timedelta) -> str:
        """A URL that writes one object."""
        return self._transport.sign("PUT", key, {}, lifetime)

    def presign_part(self, key: str, upload: str, number: int, lifetime: timedelta) -> str:
        """A URL that writes one part."""
        return self._transport.sign("PUT", key, {"partNumber": str(number), "uploadId": upload}, lifetime)

    def _pages(
        self, action: str, key: str, query: Mapping[str, str], read: Callable[[bytes], s3_xml.Page[T]]
    ) -> Iterator[T]:
        """The entries of all pages of a listing."""
        after: Mapping[str, str] | None = {}
        while after is not None:
            answer = self._agreed(self._transport.ask(action, "GET", key, {**query, **after}), action)
            page = self._understand(answer, action, read)
            yield from page.entries
            if page.after == after:
                raise refusal(self.origin, self.name, action, answer.status, "MalformedAnswer")
            after = page.after

    def _understand(self, answer: Answer, action: str, read: Callable[[bytes], T]) -> T:
        try:
            return read(answer.body)
        except s3_xml.AnswerError:
            code = answer.code or "MalformedAnswer"  # a 200 may hold an error
            raise refusal(self.origin, self.name, action, answer.status, code) from None

    def _agreed(self, answer: Answer, action: str) -> Answer:
        if 200 <= answer.status < 300:
            return answer
        if answer.status in BUSY:
            raise no_answer(self.origin, self.name, action, answer.code or f"HTTP {answer.status}")
        raise self._refusal(answer, action)

    def _refusal(self, answer: Answer, action: str) -> StoreRefused:
        code = answer.code or ("MalformedAnswer" if 200 <= answer.status < 300 else "")
        region = answer.headers.get("x-amz-bucket-region", "")
        return refusal(self.origin, self.name, action, answer.status, code, region)


def _described(key: str, headers: Mapping[str, str]) -> ObjectInfo:
    prefix = "x-amz-meta-"
    names = {name.lower(): value for name, value in headers.items()}
    try:
        return ObjectInfo(
            key=key,
            size=int(names["content-length"]),
            etag=s3_xml.bare(names["etag"]),
            last_modified=s3_xml.rfc3339(parsedate_to_datetime(names["last-modified"])),
            version_id=names.get("x-amz-version-id"),
            metadata={name.removeprefix(prefix): value for name, value in names.items() if name.startswith(prefix)},
        )
    except (KeyError, ValueError):
        raise s3_xml.AnswerError from None


def _content_md5(body: bytes) -> dict[str, str]:
    """For the store to check; not for secrecy."""
    return {"Content-MD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()}
