"""A function as a Knative Service: its name and its manifest. Pure.

The settings make Knative give what Lambda gives: one memory-capped environment per running shard, made when it is called.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradsharding.platforms import FunctionSpec
from gradsharding_reducer.task import canonical_json

GROUP, VERSION, PLURAL = "serving.knative.dev", "v1", "services"
MANAGED_BY = {"app.kubernetes.io/managed-by": "gradsharding", "app.kubernetes.io/component": "reducer"}
LAST_USED = "gradsharding.dev/last-used"
PORT = 8080


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What the operator's settings say about the pods of functions."""

    image: str
    cpu_request: str = "250m"
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, Any]] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    pull_secrets: Sequence[str] = ()


def service_name(function: FunctionSpec, image: str) -> str:
    """Equal functions have equal names, so rounds share them; another cap, timeout or store gets a function of its own."""
    facts = [
        image, function.memory_mib, function.timeout_seconds, function.max_concurrency, function.at_once,
        list(function.origins), function.ca_pem or "",
    ]  # fmt: skip
    return f"reducer-{function.memory_mib}-{hashlib.sha256(canonical_json(facts)).hexdigest()[:10]}"


def build_service(
    function: FunctionSpec,
    pods: PodSettings,
    namespace: str,
    owners: Sequence[Mapping[str, Any]],
    last_used: str,
    initial_scale: int = 0,
) -> dict[str, Any]:
    """The manifest. ``initial_scale`` is 1 where the cluster does not allow 0."""
    environment = {"GRADSHARDING_ALLOWED_ORIGINS": " ".join(function.origins)}
    if function.ca_pem:
        environment["GRADSHARDING_CA_PEM"] = function.ca_pem
    memory = f"{function.memory_mib}Mi"
    pod: dict[str, Any] = {
        "containerConcurrency": 1,
        "timeoutSeconds": function.timeout_seconds,
        "responseStartTimeoutSeconds": function.timeout_seconds,  # unset, Knative fills in 300
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "containers": [
            {
                "name": "reducer",
                "image": pods.image,
                "ports": [{"containerPort": PORT}],
                "env": [{"name": name, "value": value} for name, value in environment.items()],
                "resources": {
                    "requests": {"cpu": pods.cpu_request, "memory": memory},
                    "limits": {"memory": memory},
                },
                "readinessProbe": {"httpGet": {"path": "/healthz", "port": 0}},
                "securityContext": {
                    "runAsNonRoot": True,
                    "readOnlyRootFilesystem": True,
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
            }
        ],
    }
    if pods.node_selector:
        pod["nodeSelector"] = dict(pods.node_selector)
    if pods.tolerations:
        pod["tolerations"] = [dict(toleration) for toleration in pods.tolerations]
    if pods.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in pods.pull_secrets]
    scaling = {
        "target-burst-capacity": "-1",  # the activator stays in the path: no call queues behind a busy pod
        "target-utilization-percentage": "100",
        "initial-scale": str(initial_scale),
        "max-scale": str(function.max_concurrency),
    }
    if function.at_once > 1:  # Knative refuses a 1
        scaling["activation-scale"] = str(function.at_once)
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "Service",
        "metadata": {
            "name": service_name(function, pods.image),
            "namespace": namespace,
            "labels": {
                "app.kubernetes.io/name": "gradsharding-reducer",
                "app.kubernetes.io/part-of": "gradsharding",
                **MANAGED_BY,
                "networking.knative.dev/visibility": "cluster-local",
            },
            "annotations": {LAST_USED: last_used},
            "ownerReferences": [dict(owner) for owner in owners],
        },
        "spec": {
            "template": {
                "metadata": {
                    "labels": {**pods.labels, **MANAGED_BY},
                    "annotations": {
                        **pods.annotations,
                        **{f"autoscaling.knative.dev/{name}": value for name, value in scaling.items()},
                    },
                },
                "spec": pod,
            }
        },
    }
