"""Waiting for a condition instead of for a time."""

import time


def wait_for(what, probe, seconds=90, every=0.1):
    """What ``probe`` gives once that is true. Fails with its last value."""
    deadline = time.monotonic() + seconds
    while True:
        value = probe()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s, last seen {value!r:.2000}"
        time.sleep(every)
