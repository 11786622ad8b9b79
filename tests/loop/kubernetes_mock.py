"""A small API server on KMock: versions, generations, the status subresource and finalizers, as the operator relies on them.

KMock parses requests, serves the discovery and records everything; what it does not have (resource versions, JSON patches
that test them, subresources, watches that go on where a list ended) is here. It runs in a thread of its own: tests are
plain functions that change objects and wait for conditions.
"""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
import uuid
from datetime import UTC, datetime

import jsonpatch
import kmock

ROUNDS = "aggregationrounds"
NAMESPACE = "default"
LIMIT = 30.0
"""Seconds until a condition that a test waits for is called missed."""


class Api(kmock.KubernetesScaffold):
    """The verbs, on a Cluster."""

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        self.cluster = None
        self.resources[f"gradsharding.dev/v1alpha1/{ROUNDS}"] = kmock.ResourceInfo(
            namespaced=True,
            kind="AggregationRound",
            singular="aggregationround",
            verbs=["get", "list", "watch", "patch", "delete"],
            subresources=["status"],
        )
        for name in ("namespaces", "events", "secrets"):
            self.resources[f"v1/{name}"] = kmock.ResourceInfo(
                namespaced=name != "namespaces", verbs=["get", "list", "watch"]
            )
        for name in ("list", "watch", "fetch", "create", "update", "delete"):
            self.fallback[kmock.action(name)] << getattr(self, f"_serve_{name}")

    def _serve_list(self, request):
        cluster = self.cluster
        if not self._known(request):
            raise kmock.KubernetesResourceNotFoundError()
        with cluster.changed:
            return {
                "metadata": {"resourceVersion": str(cluster.version)},
                "items": cluster.all(request.resource.plural),
            }

    def _known(self, request):
        return request.resource in list(self.resources) or any(
            plural == request.resource.plural for plural, _, _ in self.cluster.objects
        )

    async def _serve_watch(self, request):
        yield b""
        seen, cluster = int(request.params.get("resourceVersion", 0)), self.cluster
        while True:
            wake = cluster.wake
            with cluster.changed:
                news = [event for event in cluster.events if event[0] > seen and event[1] == request.resource.plural]
            for version, _, kind, body in news:
                seen = version
                yield {"type": kind, "object": body}
            await wake.wait()

    def _serve_fetch(self, request):
        return self.cluster.get(request.resource.plural, request.namespace, request.name)

    def _serve_create(self, request):
        return self.cluster.create(request.resource.plural, request.namespace, request.data)

    def _serve_update(self, request):
        self.cluster.before_write(request)
        return self.cluster.patch(
            request.resource.plural, request.namespace, request.name, request.data, subresource=request.subresource
        )

    def _serve_delete(self, request):
        uid = ((request.data or {}).get("preconditions") or {}).get("uid")
        return self.cluster.delete(request.resource.plural, request.namespace, request.name, uid)


class Cluster:
    """The objects of one API server. All methods may be called from any thread."""

    def __init__(self, clock=time.time):
        self.clock = clock
        self.changed = threading.Condition(threading.RLock())
        self.objects = {}
        self.events = []
        """Of watches: (version, plural, type, object)."""
        self.version = 100
        self.api = Api()
        self.api.cluster = self
        self.before_write = lambda request: None
        self.wake = None
        self.url = ""
        self._loop = None
        self._stop = None
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="api server")
        self._thread.start()
        assert started.wait(LIMIT)

    async def _serve(self, started):
        self._loop, self._stop, self.wake = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        async with self.api, kmock.Server(self.api) as server:
            self.url = str(server.url).rstrip("/")
            started.set()
            await self._stop.wait()

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()

    def kubeconfig(self):
        """As JSON, which is YAML."""
        return json.dumps({
            "current-context": "mock",
            "contexts": [{"name": "mock", "context": {"cluster": "mock", "user": "mock", "namespace": NAMESPACE}}],
            "clusters": [{"name": "mock", "cluster": {"server": self.url}}],
            "users": [{"name": "mock", "user": {"token": "mock"}}],
        })  # fmt: skip

    # What the API server does

    def get(self, plural, namespace, name):
        with self.changed:
            try:
                return copy.deepcopy(self.objects[plural, namespace, name])
            except KeyError:
                raise kmock.KubernetesObjectNotFoundError(details={"name": name}) from None

    def all(self, plural):
        with self.changed:
            return [copy.deepcopy(body) for (kind, _, _), body in self.objects.items() if kind == plural]

    def create(self, plural, namespace, body):
        with self.changed:
            body = copy.deepcopy(body)
            meta = body.setdefault("metadata", {})
            meta.setdefault("name", f"{meta.get('generateName', '')}{uuid.uuid4().hex[:5]}")
            assert (plural, namespace, meta["name"]) not in self.objects
            meta |= {
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "generation": 1,
                "creationTimestamp": self._now(),
            }
            if plural == ROUNDS:
                body.pop("status", None)
            self._put("ADDED", plural, body)
            return copy.deepcopy(body)

    def patch(self, plural, namespace, name, changes, subresource=None):
        with self.changed:
            old = self.get(plural, namespace, name)
            try:
                new = jsonpatch.apply_patch(old, changes) if isinstance(changes, list) else _merge(old, changes)
            except (jsonpatch.JsonPatchConflict, jsonpatch.JsonPatchTestFailed) as error:
                raise kmock.KubernetesError(422, "Invalid", str(error)) from None
            if plural == ROUNDS:
                kept = old if subresource == "status" else new
                new = {**kept, "status": (new if subresource == "status" else old).get("status")}
                new = {key: value for key, value in new.items() if value is not None}
            if not new["metadata"].get("finalizers", True):
                del new["metadata"]["finalizers"]
            if new == old:
                return old
            if new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] += 1
            gone = "deletionTimestamp" in new["metadata"] and "finalizers" not in new["metadata"]
            self._put("DELETED" if gone else "MODIFIED", plural, new)
            return copy.deepcopy(new)

    def delete(self, plural, namespace, name, uid=None):
        with self.changed:
            body = self.get(plural, namespace, name)
            if uid is not None and uid != body["metadata"]["uid"]:
                raise kmock.KubernetesError(409, "Conflict", "another object has the name now")
            if "finalizers" not in body["metadata"]:
                self._put("DELETED", plural, body)
            elif "deletionTimestamp" not in body["metadata"]:
                body["metadata"]["deletionTimestamp"] = self._now()
                self._put("MODIFIED", plural, body)
            return body

    def _put(self, kind, plural, body):
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        key = (plural, body["metadata"]["namespace"], body["metadata"]["name"])
        if kind == "DELETED":
            del self.objects[key]
        else:
            self.objects[key] = copy.deepcopy(body)
        self.events.append((self.version, plural, kind, copy.deepcopy(body)))
        self.changed.notify_all()
        self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self):
        self.wake.set()
        self.wake = asyncio.Event()

    def _now(self):
        return datetime.fromtimestamp(self.clock(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    # What tests ask

    def wait(self, condition, what="a condition"):
        """Until ``condition()``, asked after each change, is true; its value."""
        deadline = time.monotonic() + LIMIT
        with self.changed:
            while not (value := condition()):
                left = deadline - time.monotonic()
                assert left > 0, f"missed {what}: {json.dumps(self.all(ROUNDS), indent=1)}"
                self.changed.wait(min(left, 0.05))
            return value

    def history(self, name):
        """All versions of a round, oldest first."""
        with self.changed:
            return [body for _, plural, _, body in self.events if plural == ROUNDS and body["metadata"]["name"] == name]

    def watches(self):
        """How many watches of rounds were begun."""
        return sum(r.action is kmock.action.WATCH and r.resource.plural == ROUNDS for r in list(self.api))

    def writes(self):
        """(method, plural, subresource) of all writing requests."""
        return [
            (str(request.method.value), request.resource.plural, request.subresource)
            for request in list(self.api)
            if request.resource is not None and request.method.value in ("POST", "PUT", "PATCH", "DELETE")
        ]


def _merge(old, changes):
    """JSON merge patch."""
    if not isinstance(changes, dict):
        return changes
    new = dict(old) if isinstance(old, dict) else {}
    for key, value in changes.items():
        if value is None:
            new.pop(key, None)
        else:
            new[key] = _merge(new.get(key), value)
    return new
