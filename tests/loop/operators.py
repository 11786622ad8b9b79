"""The real operator, Kopf's loop and all, in a thread: on the API server of kubernetes_mock and a store in memory."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
import time

from inline_platform import InlinePlatform
from loop.kubernetes_mock import LIMIT, NAMESPACE, ROUNDS, Cluster
from memory_store import MemoryStore
from rounds_kit import OUTPUT, assert_mean, document, keys_under, manifest, tensors, upload

from gradsharding.kube import main
from gradsharding.kube.logs import NextPass
from gradsharding.kube.operator import Operator
from gradsharding.kube.settings import Settings
from gradsharding.platforms.knative_service import PodSettings
from gradsharding.rounds.output import read_output
from gradsharding_reducer.cancellation import Cancellation

MIN_PART = 4096
KEYS = {"accessKey": "access-1", "secretKey": "secret-1"}


class Crash(BaseException):
    """The process is gone: no handler of it may run."""


class World:
    """A cluster, a store, a clock that tests may set forward, and operators."""

    def __init__(self, monkeypatch, tmp_path):
        self.ahead = 0.0
        self.cluster = Cluster(self.now)
        self.store = MemoryStore(min_part=MIN_PART)
        self.bucket = self.store.bucket("federation")
        self.operators = []
        self.untidy = False
        """Kopf's tasks die in this test."""
        self.script = None
        """As in InlinePlatform."""
        kubeconfig = tmp_path / "kubeconfig"
        kubeconfig.write_text(self.cluster.kubeconfig())
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        self.secret("store", **KEYS)

    def now(self):
        return time.time() + self.ahead

    def close(self):
        for operator in self.operators:
            operator.stop()
        self.cluster.close()
        self.store.close()
        self.untidy |= any(operator.crashed.is_set() for operator in self.operators)
        self.operators.clear()

    def operator(self, **options):
        """Start one, and wait until it watches."""
        before = self.cluster.watches()
        operator = OperatorThread(self, **options)
        self.operators.append(operator)
        self.cluster.wait(lambda: self.cluster.watches() > before, "the watch of the operator")
        return operator

    def secret(self, name, **data):
        """Create or replace a Secret."""
        body = {"data": {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}}
        if ("secrets", NAMESPACE, name) in self.cluster.objects:
            self.cluster.delete("secrets", NAMESPACE, name)
        self.cluster.create("secrets", NAMESPACE, {"metadata": {"name": name}, **body})

    def upload(self, *numbers):
        """Clients' updates; the same number is the same update."""
        for number in numbers:
            upload(self.bucket, f"{number}.safetensors", tensors(number, 2400), 10 + number)

    def apply(self, name="round", **changes):
        """Create a round; ``changes`` as in rounds_kit.manifest. The store's host is refused or allowed by its name only."""
        changes.setdefault("store", {"endpoint": "http://store.svc:9000", "credentialsSecretName": "store"})
        body = manifest(**changes)
        body["metadata"] = {"name": name}
        return self.cluster.create(ROUNDS, NAMESPACE, body)

    def patch(self, name="round", **spec):
        self.cluster.patch(ROUNDS, NAMESPACE, name, {"spec": spec})

    def delete(self, name="round"):
        self.cluster.delete(ROUNDS, NAMESPACE, name)

    def get(self, name="round"):
        return self.cluster.get(ROUNDS, NAMESPACE, name)

    def exists(self, name="round"):
        return (ROUNDS, NAMESPACE, name) in self.cluster.objects

    def condition(self, kind, name="round"):
        found = self.get(name).get("status", {}).get("conditions", [])
        return next((condition for condition in found if condition["type"] == kind), None)

    def wait_for(self, kind, status=None, reason=None, name="round"):
        """Until a condition is so; the condition."""

        def reached():
            found = self.condition(kind, name)
            same = found and (status in (None, found["status"]) and reason in (None, found["reason"]))
            return found if same else None

        return self.cluster.wait(reached, f"{kind} {status} {reason}")

    def wait_for_end(self, status="True", reason=None, name="round"):
        """Until a round has ended and is let go."""
        ended = self.wait_for("Succeeded", status, reason, name)
        self.cluster.wait(lambda: "finalizers" not in self.get(name)["metadata"], "the finalizer to go")
        return ended

    def events(self, reason):
        return [event for event in self.cluster.all("events") if event["reason"] == reason]

    def check_success(self, numbers, name="round"):
        """One right output with the right manifest, and nothing else."""
        assert_mean(self.bucket, [(tensors(number, 2400), 10 + number) for number in numbers])
        made = document(self.bucket)
        assert made["round"] == self.get(name)["metadata"]["uid"]
        assert read_output(self.bucket, OUTPUT).plan == (
            made["round"],
            made["plan"]["revision"],
            made["plan"]["sha256"],
        )
        self.check_nothing_left([OUTPUT, OUTPUT + ".manifest.json"])

    def check_nothing_left(self, but=()):
        assert keys_under(self.bucket, OUTPUT) == list(but)
        assert self.bucket.list_uploads(OUTPUT) == []


class Functions(InlinePlatform):
    """Functions that end when they are hung up on, before the hang-up returns: no zombies."""

    def __init__(self, store, script):
        self.cancellation = Cancellation()
        super().__init__(store.origin, script, self.cancellation)

    async def invoke(self, task, attempt):
        call = asyncio.ensure_future(super().invoke(task, attempt))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self.cancellation.cancel()
            await asyncio.wait([call])
            raise


class ScriptedOperator(Operator):
    """Its store and its functions are the test's."""

    def bucket(self, spec, name, keys, ca_pem):
        self.here.keys = keys
        return self.here.store.bucket(name, create=False)

    def platform(self, spec, namespace, owner):
        functions = Functions(self.here.store, self.here.world.script)
        self.here.functions.append(functions)
        return functions


class OperatorThread:
    """``crash_at``: the store operation, counted from 0, at which the process is as if killed. ``on_operation(op, key)`` may raise."""

    def __init__(self, world, crash_at=None, on_operation=None, namespaces=(NAMESPACE,), **settings):
        self.world = world
        self.operations = []
        self.keys = None
        self.functions = []
        self.crashed = threading.Event()
        self.operator = None
        self._crash_at, self._on_operation, self._namespaces = crash_at, on_operation, namespaces
        self._lock = threading.Lock()
        # A front of its own on the same content: its operations, and those of its functions, are known from others'.
        self.store = MemoryStore(min_part=MIN_PART, before=self._before)
        self.store.buckets, self.store.lock = world.store.buckets, world.store.lock
        settings.setdefault("allowed_endpoints", ("*.svc",))
        self._settings = Settings(PodSettings("image"), port=0, **settings)
        self._stop, self._ready = threading.Event(), threading.Event()
        self._error = None
        self._thread = threading.Thread(target=self._run, name="operator")
        self._thread.start()
        assert self._ready.wait(LIMIT)

    def _run(self):
        try:
            asyncio.run(main.run(self._settings, self._namespaces, self._stop, self._ready, self._make))
        except BaseException as error:  # noqa: BLE001 - stop() raises it
            self._error = error
        finally:
            self._ready.set()

    def _make(self, *arguments):
        self.operator = ScriptedOperator(*arguments, clock=self.world.now)
        self.operator.here = self
        return self.operator

    def _before(self, op, key):
        with self._lock:
            if self.crashed.is_set():
                raise Crash
            if len(self.operations) == self._crash_at:
                self.crashed.set()
                for functions in self.functions:
                    functions.cancellation.cancel()
                raise Crash
            self.operations.append((op, key))
        if self._on_operation is not None:
            self._on_operation(op, key)

    def stop(self):
        """As SIGTERM does; seconds that it took."""
        begun = time.monotonic()
        self._stop.set()
        self._thread.join(LIMIT)
        assert not self._thread.is_alive(), "the operator does not stop"
        self.store.close()
        error, self._error = self._error, None
        if error is not None and not self.crashed.is_set():
            raise error
        return time.monotonic() - begun

    @property
    def passes(self):
        """Passes so far, over all rounds."""
        return self.operator.metrics.registry.get_sample_value("gradsharding_pass_seconds_count")


def noise(records):
    """What an operator logged that nobody may see: warnings and errors, but for the passes that logs.py hides."""
    return [
        record.getMessage()
        for record in records
        if record.levelno >= logging.WARNING
        and record.name.startswith(("kopf", "gradsharding"))
        and not record.getMessage().endswith((NextPass.MARK, "is cancelled. Will escalate."))
    ]
