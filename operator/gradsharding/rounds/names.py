"""What the strings of a manifest must look like. The CRD says the same in CEL: change both, ``tests/crd`` compares."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable


class Rule(NamedTuple):
    """``holds`` is true of a string that obeys; ``words`` follow the field's path in a message."""

    holds: Callable[[str], object]
    words: str


MAX_KEY_BYTES = 900
"""S3 allows 1024: the rest is for ``.round/<uid>/<revision>/shards/<shard>/<part>.json`` behind an output's key."""

_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
_DNS_NAME = rf"{_LABEL}(\.{_LABEL})*"
_FUNCTION = (
    r"(arn:aws[a-z-]*:lambda:[a-z0-9-]+:[0-9]{12}:function:)?[A-Za-z0-9_-]{1,64}(:([A-Za-z0-9_-]{1,128}|\$LATEST))?"
)


def _matches(pattern: str, most: int = 1024) -> Callable[[str], object]:
    compiled = re.compile(pattern)
    return lambda text: len(text) <= most and compiled.fullmatch(text)


def _lacks(pattern: str) -> Callable[[str], object]:
    compiled = re.compile(pattern)
    return lambda text: not compiled.search(text)


def _port_exists(endpoint: str) -> bool:
    port = re.search(r":([0-9]{5})$", endpoint)
    return port is None or int(port[1]) <= 65535


ROUND = (
    # 52 leaves 11 characters of a label value or a pod's name, as Kubernetes' own CronJob does.
    Rule(
        _matches(_LABEL, 52),
        "must be at most 52 lower-case letters, digits and hyphens, with a letter or digit at each end",
    ),
)
SECRET = (Rule(_matches(_DNS_NAME, 253), "must be the name of a Secret of the round's namespace, in lower case"),)
ENDPOINT = (
    Rule(
        _matches(rf"https?://({_DNS_NAME}|\[[0-9a-f:]+\])(:[1-9][0-9]{{0,4}})?", 300),
        "must be http:// or https://, a host in lower case and perhaps a port, such as http://minio:9000, and no more",
    ),
    Rule(_port_exists, "must have a port from 1 to 65535"),
)
REGION = (
    Rule(
        _matches(r"[A-Za-z0-9_-]+", 63), "must be 1 to 63 letters, digits, hyphens and underscores, such as us-east-1"
    ),
)
BUCKET = (
    Rule(
        lambda text: 3 <= len(text) <= 63 and re.fullmatch(_DNS_NAME, text),
        "must be 3 to 63 lower-case letters, digits, hyphens and dots, with a letter or digit beside each dot and end",
    ),
    Rule(lambda text: not re.fullmatch(r"[0-9]+(\.[0-9]+){3}", text), "must not look like an IP address"),
)
FUNCTION = (
    Rule(_matches(_FUNCTION), "must be the name or ARN of an AWS Lambda function, with a version or alias if need be"),
)

_RELATIVE = (
    Rule(_lacks(r"^/"), "must not start with '/': keys of S3 are relative to the bucket"),
    Rule(_lacks(r"//"), "must not contain '//'"),
    Rule(_lacks(r"(^|/)\.\.?(/|$)"), "must not contain '.' or '..' between slashes"),
    # Surrogates cannot be in UTF-8; a YAML escape can make them.
    Rule(_lacks(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]"), "must not contain control characters"),
    Rule(lambda text: len(text.encode()) <= MAX_KEY_BYTES, f"must be at most {MAX_KEY_BYTES} bytes of UTF-8"),
)
PREFIX = (
    # Not empty: all later outputs of the bucket would lie among the updates.
    Rule(lambda text: text.endswith("/"), "must end with '/', since the updates of a round need a folder of their own"),
    *_RELATIVE,
)
KEY = (Rule(lambda text: text.endswith(".safetensors"), "must end with '.safetensors'"), *_RELATIVE)
