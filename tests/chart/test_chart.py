"""Each switch of the chart, as Helm renders it. Marked ``cluster``, since Helm need not be there; no cluster is asked."""

import json
import re

import pytest
import yaml
from chart.kit import CHART, IMAGES, ROOT, helm, merged, render, rules, template

from gradsharding.kube.settings import DEFAULT_ENDPOINTS, PREFIX, Settings, read_settings
from gradsharding.platforms.knative_service import MANAGED_BY

pytestmark = pytest.mark.cluster

NAME = "averager"
CRD = ("CustomResourceDefinition", "aggregationrounds.gradsharding.dev", "")
STORE_RULE = {"to": [{"ipBlock": {"cidr": "10.1.2.3/32"}}], "ports": [{"port": 9000}]}


def deployment(values=None):
    return render(values)["Deployment", NAME, "system"]


def pod(values=None):
    return deployment(values)["spec"]["template"]["spec"]


def settings(values=None):
    """What the operator would read in that pod."""
    (container,) = pod(values)["containers"]
    return read_settings({variable["name"]: variable["value"] for variable in container["env"] if "value" in variable})


def kinds(objects):
    return {kind for kind, _, _ in objects}


def refusal(values):
    process = template(values, check=False)
    assert process.returncode
    return process.stderr


def test_lint():
    arguments = ("--strict", "--kube-version", "v1.34.4", "--set-json", f"image={json.dumps(IMAGES['image'])}")
    process = helm("lint", CHART, *arguments, "--set-json", f"functions={json.dumps(IMAGES['functions'])}")
    assert "0 chart(s) failed" in process.stdout
    assert "[WARNING]" not in process.stdout


@pytest.mark.parametrize("given", [{}, {"image": IMAGES["image"]}, {"functions": IMAGES["functions"]}])
def test_without_images_one_sentence_names_the_command(given):
    assert "build and push both images with `make images REGISTRY=host/path`" in refusal(given)


@pytest.mark.parametrize(
    ("typo", "word"),
    [
        ({"watchNamespace": ["a"]}, "watchNamespace"),
        ({"functions": {"cpuRequests": "1"}}, "cpuRequests"),
        ({"metrics": {"serviceMonitor": {"enable": True}}}, "enable"),
        ({"networkPolicy": {"store": [{"too": []}]}}, "too"),
        ({"functions": {"idleSeconds": 59}}, "idleSeconds"),
        ({"functions": {"labels": {"a": 1}}}, "labels"),
        ({"allowedEndpoints": ["two words"]}, "allowedEndpoints"),
        ({"clusterWide": "yes"}, "clusterWide"),
    ],
)
def test_a_typo_or_a_wrong_type_fails(typo, word):
    assert word in refusal(merged(IMAGES, typo))


def test_the_defaults_are_the_operators_own():
    expected = Settings(pods=settings().pods, allowed_endpoints=DEFAULT_ENDPOINTS)
    assert settings() == expected
    assert settings().pods == read_settings({f"{PREFIX}REDUCER_IMAGE": "r.example/reducer:0.1.0"}).pods


def test_every_setting_reaches_the_operator():
    toleration = {"key": "spot", "operator": "Exists"}
    found = settings(
        {
            "allowedEndpoints": ["s3.example", "10.1.2.3:9000"],
            "ambientCredentials": True,
            "lambda": {"functions": ["a-*", "b"]},
            "functions": {
                "image": {"tag": "7"}, "pullSecrets": ["pull"], "cpuRequest": "1", "idleSeconds": 2_000_000,
                "nodeSelector": {"zone": "a"}, "tolerations": [toleration], "labels": {"team": "x"}, "annotations": {"note": "a b"},
            },
        }
    )  # fmt: skip
    assert (found.allowed_endpoints, found.ambient_credentials) == (("s3.example", "10.1.2.3:9000"), True)
    assert (found.lambda_functions, found.idle_function_seconds) == (("a-*", "b"), 2_000_000)
    assert (found.pods.image, found.pods.cpu_request) == ("r.example/reducer:7", "1")
    assert (found.pods.node_selector, found.pods.tolerations) == ({"zone": "a"}, (toleration,))
    assert (found.pods.labels, found.pods.annotations) == ({"team": "x"}, {"note": "a b"})
    assert found.pods.pull_secrets == ("pull",)


def test_every_setting_of_the_operator_has_a_value():
    source = (ROOT / "operator/gradsharding/kube/settings.py").read_text()
    known = {PREFIX + name for name in re.findall(r'get\("([A-Z_]+)"', source)} | {f"{PREFIX}REDUCER_IMAGE"}
    (container,) = pod()["containers"]
    assert {variable["name"] for variable in container["env"]} - {"POD_ID"} == known - {f"{PREFIX}PORT"}


def test_empty_lists_allow_nothing():
    found = settings({"allowedEndpoints": [], "lambda": {"functions": []}})
    assert (found.allowed_endpoints, found.lambda_functions) == ((), ())


def test_images_by_tag_or_digest():
    digest = "sha256:" + "0" * 64
    (container,) = pod({"image": {"digest": digest, "tag": "7", "pullPolicy": "Always", "pullSecrets": ["a", "b"]}})[
        "containers"
    ]
    assert (container["image"], container["imagePullPolicy"]) == (f"r.example/operator@{digest}", "Always")
    assert settings({"functions": {"image": {"digest": digest}}}).pods.image == f"r.example/reducer@{digest}"
    (container,) = pod()["containers"]
    assert container["image"] == f"r.example/operator:{version()}"
    assert pod({"image": {"pullSecrets": ["a", "b"]}})["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def version():
    return re.search(r'"(.+)"', (ROOT / "reducer_image/gradsharding_reducer/__init__.py").read_text().splitlines()[-1])[
        1
    ]


def test_the_versions_are_the_packages():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"], chart["kubeVersion"]) == (version(), version(), ">= 1.29.0-0")


def test_one_hardened_operator():
    spec, container = deployment()["spec"], pod()["containers"][0]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    assert pod()["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert container["securityContext"] == {
        "readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= container.keys()
    assert container["resources"]["limits"].keys() == {"memory"}
    assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()


def test_switches_of_the_pod():
    changes = {
        "priorityClassName": "high", "nodeSelector": {"a": "b"}, "tolerations": [{"key": "t"}],
        "affinity": {"nodeAffinity": {}}, "podLabels": {"l": "1"}, "podAnnotations": {"n": "2"}, "logFormat": "plain",
        "env": [{"name": "AWS_REGION", "value": "eu-central-1"}], "resources": {"limits": {"memory": "1Gi"}},
    }  # fmt: skip
    template = deployment({"operator": changes})["spec"]["template"]
    for field in ("priorityClassName", "nodeSelector", "tolerations", "affinity"):
        assert template["spec"][field] == changes[field]
    assert template["metadata"]["labels"]["l"] == "1"
    assert template["metadata"]["annotations"] == {"n": "2"}
    (container,) = template["spec"]["containers"]
    assert container["env"][-1] == changes["env"][0]
    assert "--log-format=plain" in container["args"]
    assert container["resources"]["limits"] == {"memory": "1Gi"}


def test_by_default_it_watches_its_own_namespace_with_a_role():
    objects = render()
    assert pod()["containers"][0]["args"][2:] == ["--namespace=system"]
    roles = {key for key in objects if key[0] == "Role"}
    assert roles == {("Role", NAME, "system"), ("Role", f"{NAME}-system-api-server", "default")}
    assert "ClusterRoleBinding" not in kinds(objects)


def test_a_role_in_each_watched_namespace():
    objects = render({"watchNamespaces": ["a", "b"]})
    assert deployment({"watchNamespaces": ["a", "b"]})["spec"]["template"]["spec"]["containers"][0]["args"][2:] == [
        "--namespace=a",
        "--namespace=b",
    ]
    for namespace in ("a", "b"):
        assert objects["Role", NAME, namespace]["rules"] == objects["Role", NAME, "a"]["rules"]
        (subject,) = objects["RoleBinding", NAME, namespace]["subjects"]
        assert subject == {"kind": "ServiceAccount", "name": NAME, "namespace": "system"}
    assert ("Role", NAME, "system") not in objects


def test_cluster_wide():
    objects = render({"clusterWide": True})
    assert pod({"clusterWide": True})["containers"][0]["args"][2:] == ["--all-namespaces"]
    assert {key for key in objects if key[0] == "Role"} == {("Role", f"{NAME}-system-api-server", "default")}
    assert rules(objects) == rules(render())


def test_no_right_is_a_star_and_secrets_are_only_read():
    found = rules(render()) | rules(render({"clusterWide": True}))
    assert not [right for right in found if "*" in right]
    assert {verb for _, resource, verb in found if resource == "secrets"} == {"get"}


def test_rbac_can_be_narrowed_or_left_to_others():
    narrowed = render({"rbac": {"secretNames": ["store-credentials"]}})["Role", NAME, "system"]["rules"]
    (secrets,) = [rule for rule in narrowed if rule["resources"] == ["secrets"]]
    assert secrets["resourceNames"] == ["store-credentials"]
    none = render({"rbac": {"create": False, "aggregate": False}})
    assert not kinds(none) & {"Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}


def test_people_get_rights_through_the_roles_of_kubernetes():
    objects = render()
    view, edit = (objects["ClusterRole", f"{NAME}-system-{name}", ""] for name in ("view", "edit"))
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert {verb for rule in view["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_the_service_account():
    role = {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/x"}
    objects = render({"serviceAccount": {"annotations": role, "name": "mine"}})
    assert objects["ServiceAccount", "mine", "system"]["metadata"]["annotations"] == role
    assert objects["Deployment", NAME, "system"]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    foreign = render({"serviceAccount": {"create": False, "name": "theirs"}})
    assert "ServiceAccount" not in kinds(foreign)
    assert foreign["RoleBinding", NAME, "system"]["subjects"][0]["name"] == "theirs"
    assert "name a ServiceAccount that exists" in refusal(merged(IMAGES, {"serviceAccount": {"create": False}}))


def test_the_crd_is_the_one_source():
    source = ROOT / "crds/aggregationrounds.yaml"
    assert (CHART / "files/aggregationrounds.yaml").read_bytes() == source.read_bytes(), (
        "cp crds/aggregationrounds.yaml helm/gradsharding/files/"
    )
    rendered = render()[CRD]
    assert rendered["spec"] == yaml.safe_load(source.read_text())["spec"]
    assert rendered["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert rendered["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "Helm"


def test_the_crd_can_be_left_out_or_given_up():
    assert CRD not in render({"crds": {"enabled": False}})
    assert "annotations" not in render({"crds": {"keep": False}})[CRD]["metadata"]


def test_nothing_of_the_monitoring_is_there_by_default():
    assert not kinds(render()) & {"ServiceMonitor", "PrometheusRule", "ConfigMap", "NetworkPolicy"}


def test_the_service_monitor():
    labels = {"release": "prometheus"}
    changes = {"enabled": True, "labels": labels, "interval": "10s"}
    objects = render({"metrics": {"serviceMonitor": changes}})
    monitor = objects["ServiceMonitor", NAME, "system"]
    assert labels.items() <= monitor["metadata"]["labels"].items()
    service = objects["Service", NAME, "system"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert (endpoint["interval"], endpoint["path"]) == ("10s", "/metrics")
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]


def metrics_of_the_operator():
    """All names that /metrics can show."""
    from gradsharding.kube.metrics import Metrics

    return {
        family.name + ending
        for family in Metrics().registry.collect()
        for ending in {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[family.type]
    }


def metrics_in(text):
    return set(re.findall(r"gradsharding_[a-z_]+", text))


def test_the_alerts_ask_for_metrics_that_there_are():
    changes = {"enabled": True, "labels": {"release": "prometheus"}, "retryRatio": 0.5}
    rule = render({"metrics": {"prometheusRule": changes}})["PrometheusRule", NAME, "system"]
    alerts = rule["spec"]["groups"][0]["rules"]
    assert {a["alert"].removeprefix("GradsSharding") for a in alerts} == {"RoundsFail", "ManyRetries", "OperatorDeaf"}
    asked = metrics_in(" ".join(alert["expr"] for alert in alerts))
    assert asked
    assert asked <= metrics_of_the_operator()
    assert "> 0.5 *" in alerts[1]["expr"]
    assert "{{ $labels.reason }}" in alerts[0]["annotations"]["summary"]
    assert all('namespace="system"' in alert["expr"] for alert in alerts)


def test_the_dashboard_shows_every_metric():
    changes = {"enabled": True, "labels": {"grafana_dashboard": "1", "folder": "ml"}}
    config = render({"metrics": {"dashboard": changes}})["ConfigMap", f"{NAME}-dashboard", "system"]
    assert config["metadata"]["labels"]["folder"] == "ml"
    panels = json.loads(config["data"]["gradsharding.json"])["panels"]
    shown = metrics_in(" ".join(target["expr"] for panel in panels for target in panel["targets"]))
    assert shown <= metrics_of_the_operator()

    def family(name):
        return re.sub("_(total|bucket|count|sum)$", "", name)

    assert {family(name) for name in shown} == {family(name) for name in metrics_of_the_operator()}
    assert len({panel["id"] for panel in panels}) == len(panels)


def policies(values):
    return render({"networkPolicy": {"enabled": True, "store": [STORE_RULE]} | values})


def test_functions_reach_the_store_and_dns_alone():
    functions = policies({})["NetworkPolicy", f"{NAME}-functions", "system"]["spec"]
    assert functions["podSelector"]["matchLabels"] == MANAGED_BY
    assert functions["policyTypes"] == ["Ingress", "Egress"]
    dns, store = functions["egress"]
    assert {(port["port"], port["protocol"]) for port in dns["ports"]} == {(53, "UDP"), (53, "TCP")}
    assert store == STORE_RULE
    (ingress,) = functions["ingress"]
    assert [peer["namespaceSelector"]["matchLabels"] for peer in ingress["from"]] == [
        {"kubernetes.io/metadata.name": "knative-serving"},
        {"kubernetes.io/metadata.name": "kourier-system"},
    ]


def test_the_operators_policy():
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    objects = policies({"metricsFrom": [peer], "knativeNamespaces": ["serving"]})
    operator = objects["NetworkPolicy", NAME, "system"]["spec"]
    labels = objects["Deployment", NAME, "system"]["spec"]["template"]["metadata"]["labels"]
    assert operator["podSelector"]["matchLabels"].items() <= labels.items()
    assert operator["ingress"] == [{"ports": [{"port": "http"}], "from": [peer]}]
    assert STORE_RULE in operator["egress"]
    assert operator["egress"][-1]["to"] == [
        {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "serving"}}}
    ]


def test_policies_for_functions_stand_where_functions_run():
    def where(values, policy):
        objects = render(values | {"networkPolicy": {"enabled": True, "store": [STORE_RULE]} | policy})
        return {namespace for kind, name, namespace in objects if name == f"{NAME}-functions"}

    assert where({"watchNamespaces": ["a", "b"]}, {}) == {"a", "b"}
    assert where({"clusterWide": True}, {"functionNamespaces": ["c"]}) == {"c"}


def test_policies_without_what_they_need_are_refused():
    assert "networkPolicy.store: say where the store is" in refusal(
        merged(IMAGES, {"networkPolicy": {"enabled": True}})
    )
    wide = {"clusterWide": True, "networkPolicy": {"enabled": True, "store": [STORE_RULE]}}
    assert "networkPolicy.functionNamespaces" in refusal(merged(IMAGES, wide))


def test_names_follow_the_override_and_namespaces_the_release():
    objects = render({"fullnameOverride": "other"}, namespace="elsewhere")
    assert ("Deployment", "other", "elsewhere") in objects
    assert ("RoleBinding", "other", "elsewhere") in objects
