"""The two C programs of the benchmarks, compiled when they are needed: the raw client and the throttling proxy."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import measured

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class RangeJob(NamedTuple):
    """Bytes ``[start, start + length)`` of the object with this ETag at ``path``, its query included."""

    host: str
    port: int
    path: str
    etag: str
    start: int
    length: int


class Native:
    """Compiles into a temporary folder; use as a context manager."""

    def __enter__(self) -> Native:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            raise SystemExit("The benchmarks compile two small C programs: install a C compiler (cc, gcc or clang).")
        self._folder = tempfile.TemporaryDirectory(prefix="gradsharding-bench-")
        for name in ("raw_client", "throttle"):
            source, program = Path(__file__).with_name(f"{name}.c"), Path(self._folder.name, name)
            subprocess.run([compiler, "-O2", "-Wall", "-pthread", "-o", program, source], check=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def read(self, jobs: Sequence[RangeJob], threads: int) -> float:
        """Read all ranges over ``threads`` connections; bytes per second. Raises measured.RunFailedError."""
        lines = [f"{j.host} {j.port} {j.start} {j.start + j.length - 1} {j.etag} {j.path}\n" for j in jobs]
        ran = measured.run([f"{self._folder.name}/raw_client", str(threads)], "".join(lines).encode())
        answer = json.loads(ran.stdout)
        return float(answer["bytes"] / answer["seconds"])

    @contextmanager
    def throttled(self, host: str, port: int, bytes_per_second: float) -> Iterator[str]:
        """``http://127.0.0.1:…`` that is the store at ``host:port``, each connection limited in both directions."""
        command = [f"{self._folder.name}/throttle", host, str(port), str(bytes_per_second)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as proxy:
            try:
                assert proxy.stdout is not None
                listening = proxy.stdout.readline().strip()
                if not listening:
                    raise RuntimeError("the throttling proxy did not start")
                yield f"http://127.0.0.1:{int(listening)}"
            finally:
                proxy.kill()
