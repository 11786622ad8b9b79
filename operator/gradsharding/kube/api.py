"""The requests of the operator that are neither Kopf's nor the Knative platform's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, cast

import aiohttp

from gradsharding.errors import SettingsError
from gradsharding.kube.secrets import SecretUnusable

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient

TIMEOUT = 10.0
GROUP, VERSION, PLURAL = "gradsharding.dev", "v1alpha1", "aggregationrounds"
Json = dict[str, Any]


async def connect() -> ApiClient:
    """The cluster of this pod, or of KUBECONFIG. Raises SettingsError when there is neither."""
    from kubernetes.aio import client, config

    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            config.load_incluster_config()  # type: ignore[no-untyped-call]
        else:  # named here, since the library reads the variable when it is imported
            await config.load_kube_config(config_file=os.environ.get("KUBECONFIG"))  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise SettingsError(
            f"no cluster to work in: this is not a pod with a service account, and KUBECONFIG does not help ({error})"
        ) from None
    return client.ApiClient()


class KubeApi:
    """Secrets and rounds."""

    def __init__(self, client: ApiClient) -> None:
        from kubernetes.aio.client import CoreV1Api, CustomObjectsApi

        self._core = CoreV1Api(client)
        self._custom = CustomObjectsApi(client)

    async def secret(self, namespace: str, name: str) -> dict[str, str]:
        """The data of a Secret, base64 as stored. Raises SecretUnusable when it cannot be read just now."""
        from kubernetes.aio.client import ApiException

        try:
            found = await self._core.read_namespaced_secret(name, namespace, _request_timeout=TIMEOUT)
        except ApiException as error:
            if error.status == 404:
                raise SecretUnusable(f"Secret {name} is not there in namespace {namespace}: create it") from None
            if error.status == 403:
                raise SecretUnusable(
                    f"the operator may not read Secret {name} in namespace {namespace}: see its Role"
                ) from None
            raise SecretUnusable(
                f"Secret {name} in namespace {namespace} was not read: the Kubernetes API answered {error.status}"
            ) from None
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            raise SecretUnusable(
                f"Secret {name} in namespace {namespace} was not read: the Kubernetes API did not answer ({type(error).__name__})"
            ) from None
        return cast(dict[str, str], found.data or {})

    async def rounds(self, namespace: str | None) -> list[Json]:
        """All rounds of a namespace, or of all."""
        found: Any
        if namespace is None:
            found = await self._custom.list_cluster_custom_object(GROUP, VERSION, PLURAL, _request_timeout=TIMEOUT)
        else:
            found = await self._custom.list_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURAL, _request_timeout=TIMEOUT
            )
        return cast(list[Json], found["items"])

    async def check_rounds(self, namespace: str | None) -> None:
        """Raises SettingsError when rounds cannot be listed: their CRD is not installed, or the rights are missing."""
        from kubernetes.aio.client import ApiException

        try:
            await self.rounds(namespace)
        except ApiException as error:
            where = f"namespace {namespace}" if namespace else "the cluster"
            if error.status == 404:
                raise SettingsError(
                    "this cluster has no AggregationRounds: kubectl apply -f crds/, then start again"
                ) from None
            if error.status == 403:
                raise SettingsError(f"this operator may not list AggregationRounds of {where}: see its Role") from None
            raise

    async def delete_round(self, namespace: str, name: str, uid: str) -> None:
        """Delete a round, but not another one of the same name."""
        from kubernetes.aio.client import V1DeleteOptions, V1Preconditions

        options = V1DeleteOptions(preconditions=V1Preconditions(uid=uid))
        await self._custom.delete_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, name, body=options, _request_timeout=TIMEOUT
        )

    async def api_servers(self) -> set[tuple[str, int]]:
        """Where the API server answers: its Service, and what is behind it."""
        from kubernetes.aio.client import ApiException

        found = set()
        host = os.environ.get("KUBERNETES_SERVICE_HOST")
        if host:
            found.add((host, int(os.environ.get("KUBERNETES_SERVICE_PORT", "443"))))
        try:
            slices = await self._core.read_namespaced_endpoints("kubernetes", "default", _request_timeout=TIMEOUT)
        except (ApiException, OSError, TimeoutError, aiohttp.ClientError):
            return found  # not allowed to look, or not there yet: the Service's address is what pods know
        for subset in slices.subsets or ():
            for address in subset.addresses or ():
                found |= {(address.ip, port.port) for port in subset.ports or ()}
        return found
