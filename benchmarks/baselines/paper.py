"""The paper's way of averaging one shard, for comparison: whole shard objects, fetched one after another.

Clients have split their updates beforehand, so that an object is one shard of one client, a flat float32 ``.npy``. The
function gets each with boto3, decodes it with ``np.load``, adds it with ``np.add`` into an accumulator, divides by the
number of clients, and puts the mean as a ``.npy``. It holds three shards at its peak: body, decoded array, accumulator.
Written from the description in arXiv 2604.22072 alone, and kindly: nothing is held longer than that makes necessary.

Imported: ``average_shard(client, bucket, keys, output_key)``. As a program it is one function in one process: it reads
``{endpoint, access_key, secret_key, region, bucket, keys, output_key}`` from standard input and prints
``{bytes_read, bytes_written, seconds}``, where ``seconds`` leaves out the start of the interpreter, as for the reducer.
"""

from __future__ import annotations

import io
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import boto3
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Averaged:
    """What one function did; bytes of objects, and seconds from the first request to the last answer."""

    bytes_read: int
    bytes_written: int
    seconds: float


def average_shard(client: Any, bucket: str, keys: Sequence[str], output_key: str) -> Averaged:
    """The unweighted mean of the shards ``keys`` (1-d float32 ``.npy``, equal shapes) as ``output_key``.

    ``client`` is a boto3 S3 client. Raises what boto3 and numpy raise: it handles no fault, as the paper's does not.
    """
    started = time.monotonic()
    total: np.ndarray | None = None
    bytes_read = 0
    for key in keys:
        body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        bytes_read += len(body)
        shard = np.load(io.BytesIO(body), allow_pickle=False)
        if total is None:
            total = np.zeros_like(shard)
        np.add(total, shard, out=total)
        del body, shard
    if total is None:
        raise ValueError("the paper's way needs at least one shard")
    np.divide(total, len(keys), out=total)
    output = io.BytesIO()
    np.save(output, total)
    bytes_written = output.tell()
    client.put_object(Bucket=bucket, Key=output_key, Body=output.getvalue())
    return Averaged(bytes_read, bytes_written, time.monotonic() - started)


def client_for(store: Mapping[str, str]) -> Any:
    """A boto3 S3 client for ``{endpoint, access_key, secret_key, region}``."""
    return boto3.client(
        "s3",
        endpoint_url=store["endpoint"],
        aws_access_key_id=store["access_key"],
        aws_secret_access_key=store["secret_key"],
        region_name=store["region"],
    )


def main() -> None:
    """One function invocation: a JSON job on standard input, a JSON answer on standard output."""
    job = json.load(sys.stdin)
    print(json.dumps(asdict(average_shard(client_for(job), job["bucket"], job["keys"], job["output_key"]))))


if __name__ == "__main__":
    main()
