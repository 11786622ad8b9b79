"""The chart installed in the test cluster, with the operator as a pod. More of the environment than conftest.py names:

E2E_OPERATOR_IMAGE    the operator's image, where the nodes have it, such as dev.local/operator:test
HELM                  the helm binary; unset: from PATH
"""

import json
import os
import re
import uuid

from chart.kit import CHART, flags, helm, merged
from cluster import kubectl
from e2e.waiting import wait_for

SMALL = {"requests": {"cpu": "10m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
"""The test cluster has two CPUs, and functions of other tests."""
LABEL = "app.kubernetes.io/name=gradsharding"


def image(reference):
    repository, _, tag = reference.rpartition(":")
    return {"repository": repository, "tag": tag}


class Release:
    """One release in a namespace of its own, watching others. Its name is unlike any other's, so several fit into a cluster."""

    def __init__(self, watched, endpoints, **values):
        self.name = f"averager-{uuid.uuid4().hex[:6]}"
        self.namespace = f"gradsharding-e2e-{self.name}"
        reducer, operator = os.environ.get("E2E_REDUCER_IMAGE"), os.environ.get("E2E_OPERATOR_IMAGE")
        assert reducer, "E2E_REDUCER_IMAGE is not set: see tests/e2e/conftest.py"
        assert operator, "E2E_OPERATOR_IMAGE is not set: see tests/e2e/release.py"
        self.operator_image = operator
        base = {
            "image": image(operator), "functions": {"image": image(reducer)}, "watchNamespaces": list(watched),
            "allowedEndpoints": list(endpoints), "operator": {"logFormat": "plain", "resources": SMALL},
        }  # fmt: skip
        base["functions"]["cpuRequest"] = "50m"
        self._values = merged(base, values)

    def install(self, wait=True, **values):
        """Install or upgrade; what Helm printed. A CRD that somebody applied is adopted."""
        self._values = merged(self._values, values)
        patience = ("--wait", "--timeout", "150s") if wait else ()
        arguments = ("--take-ownership", "--create-namespace", *patience, *flags(self._values))
        return self._helm("upgrade", "--install", self.name, CHART, *arguments).stdout

    def uninstall(self):
        """Helm waits for nothing here, and must not need to."""
        self._helm("uninstall", self.name, "--ignore-not-found")

    def _helm(self, *arguments):
        return helm(*arguments, "--namespace", self.namespace, timeout=180)

    def pods(self):
        found = kubectl("-n", self.namespace, "get", "pods", "-l", LABEL, "-o", "json")
        return json.loads(found.stdout)["items"]

    def log(self):
        return kubectl("-n", self.namespace, "logs", f"deployment/{self.name}").stdout

    def metric(self, name):
        """The sum of a metric of the operator over its labels, read through the chart's Service."""
        path = f"/api/v1/namespaces/{self.namespace}/services/{self.name}:http/proxy/metrics"
        rows = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", kubectl("get", "--raw", path).stdout, re.MULTILINE)
        return sum(map(float, rows))

    def may(self, verb, resource, namespace):
        """Whether its service account has a right."""
        account = f"system:serviceaccount:{self.namespace}:{self.name}"
        answer = kubectl("auth", "can-i", verb, resource, "-n", namespace, "--as", account, check=False).stdout
        return answer.strip() == "yes"

    def token(self):
        """To be its service account for an hour."""
        return kubectl("-n", self.namespace, "create", "token", self.name, "--duration=1h").stdout.strip()

    def remove(self):
        self.uninstall()
        kubectl("delete", "namespace", self.namespace, "--wait=false", "--ignore-not-found")

    def until_gone(self):
        wait_for("the operator's pod is gone", lambda: not self.pods(), 120)
