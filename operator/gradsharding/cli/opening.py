"""From a file and options to a round's specification and its two buckets."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from typer import BadParameter

from gradsharding.credentials import ambient
from gradsharding.errors import ManifestError, StoreRefused, StoreUnreachable
from gradsharding.rounds import names
from gradsharding.rounds.spec import RoundSpec, load_round
from gradsharding.s3 import S3Bucket

if TYPE_CHECKING:
    from gradsharding.platforms.aws_lambda import LambdaPlatform
    from gradsharding.store import Bucket

_MAX_FILE = 1 << 20


def read_round(file: Path, output_key: str | None = None) -> RoundSpec:
    """The round of a manifest file. Raises ManifestError."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MAX_FILE).decode()
    except OSError as error:
        raise ManifestError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ManifestError(f"{file} is not UTF-8 text") from None
    spec = load_round(text, str(file))
    if output_key is None:
        return spec
    try:
        return spec.with_output_key(output_key)
    except ManifestError as error:
        raise ManifestError(f"--output-key: {error}") from None


def open_buckets(spec: RoundSpec, profile: str | None, endpoint: str | None) -> tuple[Bucket, Bucket]:
    """The buckets of the updates and of the output. Asks no store yet. Raises StoreRefused without keys."""
    if endpoint is not None:
        for rule in names.ENDPOINT:
            if not rule.holds(endpoint):
                raise BadParameter(f"--endpoint {rule.words}")
    where, region, keys, ca = endpoint or spec.store.endpoint, spec.store.region, ambient(profile), certificates()
    updates = S3Bucket.connect(where, spec.updates.bucket, region, keys, ca)
    if spec.output.bucket == spec.updates.bucket:
        return updates, updates
    return updates, S3Bucket.connect(where, spec.output.bucket, region, keys, ca)


def open_lambda(spec: RoundSpec, profile: str | None) -> LambdaPlatform:
    """The AWS Lambda function of a round. Asks nobody yet. Raises ManifestError when the round names none.

    Whoever runs a round by hand may call whatever their credentials allow.
    """
    from gradsharding.platforms.aws_lambda import LambdaPlatform

    function = spec.function.aws_lambda
    if function is None:
        raise ManifestError(
            "--platform lambda needs spec.function.platform: Lambda and spec.function.lambda.functionName; "
            f"the platform is {spec.function.platform}"
        )
    return LambdaPlatform(function.function_name, function.region or spec.store.region, allowed=("*",), profile=profile)


def certificates() -> str | None:
    """Further certificates to trust, from the file that AWS_CA_BUNDLE names, as with the AWS command line."""
    file = os.environ.get("AWS_CA_BUNDLE")
    if not file:
        return None
    try:
        return Path(file).read_text()
    except (OSError, UnicodeDecodeError):
        raise StoreRefused(f"AWS_CA_BUNDLE names {file}, which cannot be read: mend or unset it.", "CaBundle") from None


def advised(error: StoreUnreachable, spec: RoundSpec, endpoint: str | None) -> StoreUnreachable:
    """The error, with what to do when the endpoint is a name that only a cluster knows."""
    host = urlsplit(endpoint or spec.store.endpoint or "").hostname or ""
    if not re.search(r"\.svc($|\.)", host):
        return error
    return StoreUnreachable(
        f"{error} {host} is a name inside of a Kubernetes cluster: forward its port with kubectl and give "
        "--endpoint http://127.0.0.1:PORT."
    )
