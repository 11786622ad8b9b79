"""``gradsharding operator`` whose store never answers: run by test_process.py as a process of its own."""

import sys
import threading

from gradsharding.cli.app import execute
from gradsharding.kube import operator


class Hanging:
    """A bucket whose every operation hangs, as with a store behind a dead network."""

    origin, name = "http://store.svc:9000", "federation"

    def __getattr__(self, operation):
        def hang(*_, **__):
            sys.stderr.write(f"hanging in {operation}\n")
            threading.Event().wait()

        return hang


operator.S3Bucket.connect = lambda *_, **__: Hanging()
operator.Driver.__init__.__globals__["resolve_host"] = lambda host: []
sys.exit(execute(["operator", *sys.argv[1:]]))
