"""``python -m gradsharding_reducer [--progress] < task.json``: the answer as JSON on stdout.

With ``--progress`` stderr gets at most four lines ``progress BYTES`` a second, the bytes read so far.

Exit code 0: there is an answer, whatever its outcome. 1: there is none, and stderr holds ``{"error": "..."}``.
12 (ENOMEM): the memory cap is too small.
"""

from __future__ import annotations

import json
import os
import sys
import time

OUT_OF_MEMORY = 12

PROGRESS = "--progress"
PROGRESS_SECONDS = 0.25


def main() -> int:
    # OpenBLAS would start a thread per core and take memory for each; no BLAS is used here.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    from gradsharding_reducer.access import Access
    from gradsharding_reducer.cancellation import Cancellation
    from gradsharding_reducer.entrance import complain, describe, on_sigterm, read_task
    from gradsharding_reducer.reduce import reduce

    told = 0.0

    def progress(count: int) -> None:
        nonlocal told
        now = time.monotonic()
        if now >= told + PROGRESS_SECONDS:
            told = now
            complain(f"progress {count}")

    try:
        cancellation = Cancellation()
        on_sigterm(cancellation.cancel)
        task = read_task(sys.stdin.buffer.read())
        tell = progress if PROGRESS in sys.argv[1:] else None
        answer = reduce(task, Access.from_environment(os.environ), cancellation, progress=tell).to_json()
    except Exception as error:  # noqa: BLE001 - one sentence instead of a traceback
        complain(json.dumps({"error": describe(error)}))
        return OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
    sys.stdout.buffer.write(answer)
    sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
