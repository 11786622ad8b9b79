"""The manifest of a function, as a whole: each line of it is there for a reason that docs/knative.md gives."""

from dataclasses import replace

import pytest

from gradsharding.platforms import FunctionSpec
from gradsharding.platforms.knative_service import PodSettings, build_service, service_name

FUNCTION = FunctionSpec(256, 300, 16, 4, ("http://minio.storage.svc:9000",))
PODS = PodSettings("registry.example/reducer:1")
OWNER = {"apiVersion": "gradsharding.dev/v1alpha1", "kind": "AggregationRound", "name": "r", "uid": "u"}
USED = "2026-11-01T10:00:00Z"


def build(function=FUNCTION, pods=PODS, **options):
    return build_service(function, pods, "ns", [OWNER], USED, **options)


def test_golden():
    name = service_name(FUNCTION, PODS.image)
    assert name.startswith("reducer-256-")
    assert build() == {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "namespace": "ns",
            "labels": {
                "app.kubernetes.io/name": "gradsharding-reducer",
                "app.kubernetes.io/part-of": "gradsharding",
                "app.kubernetes.io/managed-by": "gradsharding",
                "app.kubernetes.io/component": "reducer",
                "networking.knative.dev/visibility": "cluster-local",
            },
            "annotations": {"gradsharding.dev/last-used": USED},
            "ownerReferences": [OWNER],
        },
        "spec": {
            "template": {
                "metadata": {
                    "labels": {
                        "app.kubernetes.io/managed-by": "gradsharding",
                        "app.kubernetes.io/component": "reducer",
                    },
                    "annotations": {
                        "autoscaling.knative.dev/target-burst-capacity": "-1",
                        "autoscaling.knative.dev/target-utilization-percentage": "100",
                        "autoscaling.knative.dev/initial-scale": "0",
                        "autoscaling.knative.dev/activation-scale": "4",
                        "autoscaling.knative.dev/max-scale": "16",
                    },
                },
                "spec": {
                    "containerConcurrency": 1,
                    "timeoutSeconds": 300,
                    "responseStartTimeoutSeconds": 300,
                    "automountServiceAccountToken": False,
                    "enableServiceLinks": False,
                    "containers": [
                        {
                            "name": "reducer",
                            "image": "registry.example/reducer:1",
                            "ports": [{"containerPort": 8080}],
                            "env": [{"name": "GRADSHARDING_ALLOWED_ORIGINS", "value": "http://minio.storage.svc:9000"}],
                            "resources": {
                                "requests": {"cpu": "250m", "memory": "256Mi"},
                                "limits": {"memory": "256Mi"},
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
                },
            }
        },
    }


def test_one_shard_at_once_has_no_activation_scale():
    """Knative refuses a 1."""
    annotations = build(replace(FUNCTION, at_once=1))["spec"]["template"]["metadata"]["annotations"]
    assert "autoscaling.knative.dev/activation-scale" not in annotations


def test_settings_of_the_pods():
    pods = PodSettings(
        "image", "1", {"pool": "a"}, [{"operator": "Exists"}],
        {"team": "b", "app.kubernetes.io/managed-by": "somebody"},
        {"note": "c", "autoscaling.knative.dev/max-scale": "99"}, ["registry"],
    )  # fmt: skip
    template = build(pods=pods)["spec"]["template"]
    spec, meta = template["spec"], template["metadata"]
    assert spec["containers"][0]["resources"]["requests"]["cpu"] == "1"
    assert spec["nodeSelector"] == {"pool": "a"}
    assert spec["tolerations"] == [{"operator": "Exists"}]
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert meta["labels"] == {
        "team": "b", "app.kubernetes.io/managed-by": "gradsharding", "app.kubernetes.io/component": "reducer",
    }  # fmt: skip
    assert meta["annotations"]["note"] == "c"
    assert meta["annotations"]["autoscaling.knative.dev/max-scale"] == "16", "what the rounds rest on is ours"


def test_certificates_and_initial_scale():
    template = build(replace(FUNCTION, ca_pem="PEM"), initial_scale=1)["spec"]["template"]
    assert {"name": "GRADSHARDING_CA_PEM", "value": "PEM"} in template["spec"]["containers"][0]["env"]
    assert template["metadata"]["annotations"]["autoscaling.knative.dev/initial-scale"] == "1"


@pytest.mark.parametrize(
    "change",
    [{"memory_mib": 512}, {"timeout_seconds": 60}, {"max_concurrency": 8}, {"at_once": 2}, {"origins": ("http://b",)},
     {"ca_pem": "PEM"}],
)  # fmt: skip
def test_another_function_has_another_name(change):
    assert service_name(replace(FUNCTION, **change), "image") != service_name(FUNCTION, "image")
    assert service_name(FUNCTION, "image") != service_name(FUNCTION, "other")
    assert service_name(FUNCTION, "image") == service_name(replace(FUNCTION), "image")
    assert len(service_name(replace(FUNCTION, memory_mib=10240), "image" * 99)) <= 63
