"""Finished parts leave while the next one is being folded: the store's answer to a part costs no time of the fold."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import TYPE_CHECKING

from gradsharding_reducer import small_threads
from gradsharding_reducer.task import Part, PartResult, UrlKind

if TYPE_CHECKING:
    from gradsharding_reducer.exchange import Channel


class Uploader:
    """Uploads one part at a time, in a thread beside the caller's. A part's body must stay as it is until ``settle``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._thread: threading.Thread | None = None
        self._done: PartResult | None = None
        self._error: BaseException | None = None
        self.slowest = 0.0
        """Seconds per byte of the slowest upload so far."""

    def start(self, part: Part, body: memoryview) -> None:
        """Begin to hash and upload. The one before must be settled."""
        assert self._thread is None
        self._thread = threading.Thread(target=self._work, args=(part, body), daemon=True, name="upload")
        small_threads.start([self._thread])

    def settle(self) -> PartResult | None:
        """Wait for the part that is under way, if any. Raises what its upload raised."""
        self._join()
        done, error, self._done, self._error = self._done, self._error, None, None
        try:
            if error is not None:
                raise error
        finally:
            # Or its traceback would hold this frame, and that the error: the part's memory would wait for the collector.
            del error
        return done

    def abandon(self) -> None:
        """Wait for the thread, whatever comes of it: cancel its channel first."""
        self._join()
        self._done = self._error = None  # an error holds the frames that it came through, and they the part's memory

    def _join(self) -> None:
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._thread = None

    def _work(self, part: Part, body: memoryview) -> None:
        begun = time.monotonic()
        try:
            digest = hashlib.sha256(body).hexdigest()
            etag = self._channel.put(part.url, UrlKind.PART, body)
            self._done = PartResult(part.output, part.number, len(body), etag, digest)
        except BaseException as error:  # noqa: BLE001 - told by settle(), in the thread that can act on it
            self._error = error
        self.slowest = max(self.slowest, (time.monotonic() - begun) / max(len(body), 1))
