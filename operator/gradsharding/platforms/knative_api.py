"""The few requests that the Knative platform makes, through the official client.

There is no maintained Python client of Knative: its resources go through the custom-objects API (docs/decisions/0009).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from gradsharding.platforms.knative_service import GROUP, MANAGED_BY, PLURAL, VERSION

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient

TIMEOUT = 10.0
"""Seconds for one request; a pass must not hang on a silent API server."""

Json = dict[str, Any]


class KnativeApi:
    """Services, pods and pull secrets of functions.

    Raises kubernetes.aio.client.ApiException, and OSError or TimeoutError without an answer.
    """

    def __init__(self, client: ApiClient) -> None:
        from kubernetes.aio.client import CoreV1Api, CustomObjectsApi

        self._custom = CustomObjectsApi(client)
        self._core = CoreV1Api(client)

    async def get_service(self, namespace: str, name: str) -> Json:
        """One Knative Service."""
        found: Any = await self._custom.get_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, name, _request_timeout=TIMEOUT
        )
        return cast(Json, found)

    async def list_services(self, namespace: str | None) -> list[Json]:
        """Our functions in one namespace, or in all."""
        selector = ",".join(f"{name}={value}" for name, value in MANAGED_BY.items())
        found: Any
        if namespace is None:
            found = await self._custom.list_cluster_custom_object(
                GROUP, VERSION, PLURAL, label_selector=selector, _request_timeout=TIMEOUT
            )
        else:
            found = await self._custom.list_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, label_selector=selector, _request_timeout=TIMEOUT
            )
        items: list[Json] = found["items"]
        return items

    async def create_service(self, manifest: Json) -> Json:
        """Create; 409 when it is there."""
        made: Any = await self._custom.create_namespaced_custom_object(
            GROUP, VERSION, manifest["metadata"]["namespace"], PLURAL, manifest, _request_timeout=TIMEOUT
        )
        return cast(Json, made)

    async def patch_service(self, namespace: str, name: str, patch: Json) -> Json:
        """Merge: annotations that only Knative may set stay. With a resourceVersion in it, 409 when another was faster."""
        patched: Any = await self._custom.patch_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, name, patch,
            _content_type="application/merge-patch+json", _request_timeout=TIMEOUT,
        )  # fmt: skip
        return cast(Json, patched)

    async def delete_service(self, namespace: str, name: str) -> None:
        """Delete; what it owns goes with it."""
        await self._custom.delete_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, name, _request_timeout=TIMEOUT
        )

    async def lacks_secret(self, namespace: str, name: str) -> bool:
        """Whether there is no such Secret. One that may not be read counts as there: it is the kubelet that reads it."""
        from kubernetes.aio.client import ApiException

        try:
            await self._core.read_namespaced_secret(name, namespace, _request_timeout=TIMEOUT)
        except ApiException as error:
            if error.status == 404:
                return True
            if error.status != 403:
                raise
        return False

    async def list_pods(self, namespace: str, service: str) -> list[Any]:
        """Pods of a function."""
        found = await self._core.list_namespaced_pod(
            namespace, label_selector=f"serving.knative.dev/service={service}", _request_timeout=TIMEOUT
        )
        return list(found.items)

    async def delete_pod(self, namespace: str, name: str) -> None:
        """Delete at once: what is in it is dead already."""
        await self._core.delete_namespaced_pod(name, namespace, grace_period_seconds=0, _request_timeout=TIMEOUT)
