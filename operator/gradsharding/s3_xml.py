"""The XML that S3 speaks: what answers say, and the two bodies that requests carry. Pure; answers are not trusted."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Generic, TypeVar
from urllib.parse import unquote_plus
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from gradsharding.store import ObjectInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

T = TypeVar("T")

_CODE = re.compile(r"[A-Za-z0-9._-]{1,64}")


class AnswerError(ValueError):
    """A body is not the XML that was asked for."""


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a listing; ``after`` holds the query parameters of the next one, None on the last."""

    entries: Sequence[T]
    after: Mapping[str, str] | None


def parse(body: bytes) -> ElementTree.Element:
    """The root element. Raises AnswerError.

    A document type is refused, so there are no entities to expand. Only UTF-8 is read: otherwise the check could be
    dodged by another encoding.
    """
    try:
        text = body.decode("utf-8")
        if "<!DOCTYPE" in text:
            raise AnswerError
        return ElementTree.fromstring(text)  # noqa: S314
    except (UnicodeDecodeError, ElementTree.ParseError, ValueError):
        raise AnswerError from None


def name(element: ElementTree.Element) -> str:
    """The tag without its namespace, which stores do not agree on."""
    return element.tag.rpartition("}")[2]


def children(element: ElementTree.Element, tag: str) -> Iterator[ElementTree.Element]:
    return (child for child in element if name(child) == tag)


def text(element: ElementTree.Element, tag: str) -> str:
    """Text of the first child with this tag; empty when there is none."""
    return next((child.text or "" for child in children(element, tag)), "")


def error_code(body: bytes) -> str:
    """The code of an error answer, if it is one and looks like a code. Nothing else of a body is ever shown."""
    try:
        root = parse(body)
    except AnswerError:
        return ""
    code = text(root, "Code")
    return code if name(root) == "Error" and _CODE.fullmatch(code) else ""


def bare(etag: str) -> str:
    """An ETag without quotes."""
    return etag.strip().removeprefix("W/").strip('"')


def rfc3339(moment: datetime) -> str:
    """UTC in whole seconds, cut and not rounded, since the Last-Modified header is cut as well."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def objects_page(body: bytes) -> Page[ObjectInfo]:
    """One page of ListObjectsV2, which was asked with ``encoding-type=url``. Raises AnswerError.

    The keys are decoded always: SeaweedFS encodes them as asked, but does not say so in ``EncodingType``.
    """
    root = _rooted(body, "ListBucketResult")
    objects = [
        ObjectInfo(
            key=unquote_plus(text(entry, "Key")),
            size=_number(text(entry, "Size")),
            etag=bare(text(entry, "ETag")),
            last_modified=_whole_seconds(text(entry, "LastModified")),
        )
        for entry in children(root, "Contents")
    ]
    return Page(objects, _after(root, {"continuation-token": text(root, "NextContinuationToken")}))


def uploads_page(body: bytes) -> Page[tuple[str, str]]:
    """One page of ListMultipartUploads, as (key, upload id). Raises AnswerError.

    It was asked without an encoding: asked with one, SeaweedFS says that it encoded the keys, but does not.
    """
    root = _rooted(body, "ListMultipartUploadsResult")
    uploads = [(text(entry, "Key"), text(entry, "UploadId")) for entry in children(root, "Upload")]
    markers = {"key-marker": text(root, "NextKeyMarker"), "upload-id-marker": text(root, "NextUploadIdMarker")}
    return Page(uploads, _after(root, markers))


def parts_page(body: bytes) -> Page[tuple[int, str]]:
    """One page of ListParts, as (number, ETag). Raises AnswerError."""
    root = _rooted(body, "ListPartsResult")
    parts = [(_number(text(p, "PartNumber")), bare(text(p, "ETag"))) for p in children(root, "Part")]
    return Page(parts, _after(root, {"part-number-marker": text(root, "NextPartNumberMarker")}))


def upload_id(body: bytes) -> str:
    """Of CreateMultipartUpload. Raises AnswerError."""
    upload = text(_rooted(body, "InitiateMultipartUploadResult"), "UploadId")
    if not 1 <= len(upload) <= 2048:
        raise AnswerError
    return upload


def is_completed(body: bytes) -> bool:
    """Whether a 200 of CompleteMultipartUpload means it: the store may find the error after it has sent the status."""
    try:
        return name(parse(body)) == "CompleteMultipartUploadResult"
    except AnswerError:
        return False


def delete_failures(body: bytes) -> list[str]:
    """Codes of what DeleteObjects did not remove. Raises AnswerError."""
    codes = [text(entry, "Code") for entry in children(_rooted(body, "DeleteResult"), "Error")]
    return [code if _CODE.fullmatch(code) else "unknown" for code in codes if code != "NoSuchKey"]


def complete_request(etags: Mapping[int, str]) -> bytes:
    """Body of CompleteMultipartUpload: the parts in order."""
    parts = "".join(
        f"<Part><PartNumber>{number}</PartNumber><ETag>&quot;{escape(etag)}&quot;</ETag></Part>"
        for number, etag in sorted(etags.items())
    )
    return f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()


def delete_request(keys: Sequence[str]) -> bytes:
    """Body of DeleteObjects; only what fails is to be answered."""
    objects = "".join(f"<Object><Key>{_character_data(key)}</Key></Object>" for key in keys)
    return f"<Delete><Quiet>true</Quiet>{objects}</Delete>".encode()


def fits_xml(key: str) -> bool:
    """Whether XML 1.0 can hold this key at all: it has no way to write most control characters."""
    return re.search(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", key) is None


def _character_data(key: str) -> str:
    return escape(key, {"\r": "&#13;", "\n": "&#10;", "\t": "&#9;"})


def _rooted(body: bytes, tag: str) -> ElementTree.Element:
    root = parse(body)
    if name(root) != tag:
        raise AnswerError
    return root


def _number(digits: str) -> int:
    if not re.fullmatch(r"[0-9]{1,19}", digits):
        raise AnswerError
    return int(digits)


def _whole_seconds(moment: str) -> str:
    try:
        return rfc3339(datetime.fromisoformat(moment))
    except ValueError:
        raise AnswerError from None


def _after(root: ElementTree.Element, markers: dict[str, str]) -> dict[str, str] | None:
    if text(root, "IsTruncated") != "true":
        return None
    if not any(markers.values()):
        raise AnswerError
    return {marker: value for marker, value in markers.items() if value}
