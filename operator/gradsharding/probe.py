"""Whether a store keeps the promise that the protocol rests on: of several conditional PUTs at once, exactly one wins.

Some stores check first and write then. One after another they answer 412 as they should; at once, two writers win.
"""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING

from gradsharding.errors import StoreUnsupported

if TYPE_CHECKING:
    from gradsharding.store import Bucket

WRITERS = 8

_proven: set[tuple[str, str]] = set()
"""Origins and buckets that have passed in this process. Adding to a set is atomic; to probe twice does no harm."""


def probe_conditional_put(bucket: Bucket, prefix: str) -> None:
    """Send 8 conditional PUTs of one fresh key at once, and remove it; a bucket that has passed is not asked again.

    Raises StoreUnsupported unless exactly one wins, StoreUnreachable when not all were answered.
    """
    store = (bucket.origin, bucket.name)
    if store in _proven:
        return
    key = f"{prefix}probe-{uuid.uuid4().hex}"
    start = Barrier(WRITERS)

    def write(number: int) -> bool:
        start.wait()
        return bucket.put_new(key, b"%d" % number)

    try:
        with ThreadPoolExecutor(WRITERS) as writers:
            wins = sum(writers.map(write, range(WRITERS)))
    finally:
        bucket.delete([key])
    if wins != 1:
        raise StoreUnsupported(
            f"The store {bucket.origin} let {wins} of {WRITERS} conditional PUTs of one key win in bucket "
            f"{bucket.name!r}, and a round needs exactly one: use a store with atomic 'If-None-Match: *' "
            "(AWS S3, MinIO, SeaweedFS from 4.17 on), or upgrade this one."
        )
    _proven.add(store)
